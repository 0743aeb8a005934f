"""Every hook call of Megatron-Bridge's train loop is served, with the arguments as they are given there.

The calls are written down as its source has them (main of August 2026).
"""

from __future__ import annotations

import inspect

import pytest

from megatron_ft import fault_tolerance as ft

CALLS = (
    ("setup", 2, ()),
    ("maybe_setup_simulated_fault", 1, ()),
    ("on_training_step_start", 1, ()),
    ("on_training_step_end", 1, ()),
    ("on_eval_step_start", 1, ()),
    ("on_eval_step_end", 1, ()),
    ("on_checkpointing_start", 1, ()),
    ("on_checkpointing_end", 0, ("global_state", "is_async_finalization")),
    ("on_checkpoint_loaded", 0, ("global_state", "is_local_chkpt")),
    ("shutdown", 1, ()),
    ("abort", 1, ()),
)
"""Name, how many arguments by place, and those by name."""


@pytest.mark.parametrize(("name", "places", "names"), CALLS, ids=[call[0] for call in CALLS])
def test_a_call_is_served(name: str, places: int, names: tuple[str, ...]) -> None:
    inspect.signature(getattr(ft, name)).bind(*range(places), **dict.fromkeys(names))
