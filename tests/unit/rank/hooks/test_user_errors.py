"""A mistake that only ranks can find: the launcher is told, so that it isn't made again in each cycle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.rank.faults.injection import FaultInjector, InjectedFault
from megatron_ft.rank.hooks import user_errors
from tests.support.training import clean_environment

__all__ = ["clean_environment"]  # a fixture


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the launcher was asked for."""
    requests: list[Any] = []
    fake = SimpleNamespace(send_workload_control_request=requests.append)
    monkeypatch.setattr(user_errors, "RankMonitorClient", lambda: fake)
    return requests


def test_broken_plan_of_this_rank_ends_the_job_with_2(
    told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "FT_CYCLE": "1"}.items():
        monkeypatch.setenv(name, value)
    plan = tmp_path / "plan.yaml"
    faults = [(1, 1, 5), (0, 1, 4), (1, 0, 4)]
    lines = [f"  - {{cycle: {cycle}, rank: {rank}, iteration: {at}, type: exception}}" for cycle, rank, at in faults]
    plan.write_text("\n".join(["faults:", *lines]))
    FaultInjector.of_this_rank(None, client=None).on_iteration(5)
    injector = FaultInjector.of_this_rank(plan, client=None)
    injector.on_iteration(4)
    with pytest.raises(InjectedFault):
        injector.on_iteration(5)
    injector.on_iteration(5)
    assert "rank 1 raises an exception after iteration 5 of cycle 1" in capfd.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert told == []
    with pytest.raises(SystemExit) as error:
        FaultInjector.of_this_rank(plan, client=None)
    assert error.value.code == 2
    (request,) = told
    assert capfd.readouterr().err == f"FT: ERROR: {request.description}\n"
