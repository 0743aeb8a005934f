"""What a rank writes down of Megatron's rerun state machine, and that it never takes another module for it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.link.base.rerun import MODULE, RerunState, rerun_state
from megatron_ft.link.linux.kept_descriptor import KeptDescriptor
from megatron_ft.rank.crash_reporter.reporter import CrashReporter, current_rerun_state


def machine(state: str, mode: str = "VALIDATE_RESULTS", **more: Any) -> SimpleNamespace:
    return SimpleNamespace(state=SimpleNamespace(name=state), mode=SimpleNamespace(name=mode), **more)


def use(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(_GLOBAL_RERUN_STATE_MACHINE=found))


@pytest.mark.parametrize(
    ("state", "flag"),
    [
        ("WILL_RERUN_FROM_CHECKPOINT", "checkpoint_requested"),
        ("RERUNNING_AGAIN_FROM_CHECKPOINT", "restart_again_requested"),
        ("RERUNNING_IN_PLACE", "rerun_requested"),
    ],
)
def test_the_rank_whose_result_was_rejected_says_so(monkeypatch: pytest.MonkeyPatch, state: str, flag: str) -> None:
    use(monkeypatch, machine(state, suspicious_node="n1", suspicious_device=3, **{flag: True}))
    assert current_rerun_state() == RerunState(state=state, own=True, node="n1", device=3)
    use(monkeypatch, machine(state, suspicious_node=None, suspicious_device=None, **{flag: False}))
    assert current_rerun_state() == RerunState(state=state)
    use(monkeypatch, machine(state))  # of another version
    assert current_rerun_state() == RerunState(state=state)


@pytest.mark.parametrize(
    "found",
    [
        None,
        machine("INITIAL_RUN"),
        machine("WILL_RERUN_FROM_CHECKPOINT", mode="DISABLED"),
        SimpleNamespace(state=SimpleNamespace(name=["a list"])),
    ],
)
def test_a_process_that_is_not_about_to_exit_by_the_machine_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    use(monkeypatch, found)
    assert current_rerun_state() is None


def test_a_forked_child_does_not_speak_for_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, machine("WILL_RERUN_FROM_CHECKPOINT"))
    stack = os.memfd_create("stacks")
    reporter = CrashReporter()
    reporter.stack, reporter._pid = KeptDescriptor(stack), os.getppid()
    reporter.note_rerun()
    assert os.pread(stack, 1000, 0) == b""
    reporter._pid = os.getpid()
    reporter.note_rerun()
    assert rerun_state(os.pread(stack, 1000, 0).decode()) == RerunState(state="WILL_RERUN_FROM_CHECKPOINT")
    reporter.stack.close()
