"""A loop that calls the hooks of the Megatron-LM adapter, and nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.integrations import megatron_lm
from megatron_ft.rank.faults import simulated

CALLS: dict[str, tuple[str, ...]] = {
    "setup": (),
    "on_training_step_start": (),
    "on_training_step_end": (),
    "on_eval_step_start": (),
    "on_eval_step_end": (),
    "on_checkpointing_start": (),
    "on_checkpointing_end": ("is_async_finalization",),
    "on_checkpoint_loaded": ("is_local_chkpt",),
    "shutdown": (),
    "get_rank_monitor_client": (),
    "maybe_setup_simulated_fault": (),
}
"""Megatron-LM's functions, each with the arguments that its training.py and checkpointing.py give it."""


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_lm, "_state", ft.GlobalState())
    monkeypatch.setattr(megatron_lm, "_args", None)
    monkeypatch.setattr(simulated, "_taken", "")
    monkeypatch.delenv("FT_SIM_FAULT_DESC", raising=False)


def arguments(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    """Return Megatron-LM's arguments with ``--enable-ft-package --save DIR``."""
    known = {"enable_ft_package": True, "calc_ft_timeouts": False, "ft_num_warmup_iters": None}
    return argparse.Namespace(**{**known, "save": str(tmp_path / "ckpt"), **changes})


def train(steps: int, args: Any = None, first: int = 0) -> None:
    for iteration in range(first, first + steps):
        if args is not None:
            args.curr_iteration = iteration
        megatron_lm.on_training_step_start()
        megatron_lm.on_training_step_end()


def save() -> None:
    megatron_lm.on_checkpointing_start()
    megatron_lm.on_checkpointing_end(is_async_finalization=False)


def all_hooks() -> None:
    for name, arguments in CALLS.items():
        if name.startswith("on_"):
            getattr(megatron_lm, name)(**dict.fromkeys(arguments, False))
