"""Every hook call of Megatron-Bridge's train loop is served, with the arguments as they are given there.

The calls are written down as its source has them (main of August 2026). With FT_BRIDGE_SOURCE=CHECKOUT they are read
from that checkout as well: one that isn't in the list fails the test; and its own unit tests of the module run.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path

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


def calls_in(text: str) -> set[tuple[str, int, tuple[str, ...]]]:
    """Those of the module ``fault_tolerance`` in one source file."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "fault_tolerance":
            names = tuple(sorted(keyword.arg or "" for keyword in node.keywords))
            found.add((node.func.attr, len(node.args), names))
    return found


def test_calls_are_found_in_a_source() -> None:
    text = "fault_tolerance.on_checkpointing_end(global_state=s, is_async_finalization=True); fault_tolerance.new(1)"
    assert calls_in(text) == {CALLS[7], ("new", 1, ())}


def test_the_list_holds_all_calls_of_a_checkout() -> None:
    checkout = os.environ.get("FT_BRIDGE_SOURCE")
    if checkout is None:
        pytest.skip("FT_BRIDGE_SOURCE names no checkout of Megatron-Bridge")
    sources = [*Path(checkout).rglob("src/megatron/bridge/training/*.py")]
    assert sources
    found = set().union(*(calls_in(path.read_text()) for path in sources))
    assert found
    assert found <= set(CALLS)
