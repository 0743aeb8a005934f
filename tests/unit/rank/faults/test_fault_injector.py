"""The fault injector: at its moment, once, with a record before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.rank.faults import injection
from megatron_ft.rank.faults.injection import FaultInjector
from megatron_ft.rank.faults.plan import PlannedFault
from tests.support.training import bench, clean_environment

__all__ = ["bench", "clean_environment"]  # fixtures

FAULTS = (
    PlannedFault(cycle=0, rank=1, iteration=25, type="exception"),
    PlannedFault(cycle=0, rank=0, iteration=25, type="exception"),
    PlannedFault(cycle=1, rank=0, iteration=40, type="exception"),
)


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What would have been done."""
    done: list[tuple[str, int]] = []
    monkeypatch.setattr(injection, "inject", lambda kind, *, seconds, **more: done.append((kind, seconds)))
    return done


def test_fault_is_injected_at_its_iteration_and_once(injected: list[tuple[str, int]]) -> None:
    injector = FaultInjector(FAULTS, rank=1, cycle=0)
    for iteration in range(25):
        injector.on_iteration(iteration)
    assert injected == []
    injector.on_iteration(25)
    assert injected == [("exception", 1)]
    injector.on_iteration(25)
    injector.on_iteration(26)
    assert len(injected) == 1


def test_plan_file_is_read_and_its_fault_injected_with_a_line(
    tmp_path: Path,
    injected: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "FT_CYCLE": "0"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "plan.yaml"
    file.write_text("faults:\n  - {rank: 1, iteration: 2, type: slow, seconds: 7}\n")
    injector = FaultInjector.of_this_rank(file, client=None)
    injector.on_iteration(2)
    assert injected == [("slow", 7)]
    assert (
        capfd.readouterr().err
        == "FT: SIMULATED FAULT: rank 1 is slower from now on, by 7 s for each step, after iteration 2 of cycle 0\n"
    )
