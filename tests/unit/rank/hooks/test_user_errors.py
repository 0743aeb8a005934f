"""A mistake that only ranks can find: the launcher is told, so that it isn't made again in each cycle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.rank.faults.injection import FaultInjector
from megatron_ft.rank.hooks import user_errors
from tests.support.training import (
    FakeClient,
    bench,
    clean_environment,
    client,
    start,
)

__all__ = ["bench", "clean_environment", "client"]  # fixtures


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
    plan.write_text("faults:\n  - {cycle: 1, rank: 1, iteration: 5, type: rank_killed}\n")
    assert FaultInjector.of_this_rank(None, client=None).pending() == []
    (fault,) = FaultInjector.of_this_rank(plan, client=None).pending()
    assert fault.iteration == 5
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert told == []
    with pytest.raises(SystemExit) as error:
        FaultInjector.of_this_rank(plan, client=None)
    assert error.value.code == 2
    (request,) = told
    assert capfd.readouterr().err == f"FT: ERROR: {request.description}\n"


def test_a_full_disk_doesnt_end_the_job(tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(user_errors, "try_to_write", full)
    start(tmp_path)
    assert client.open == ["setup"]


def test_save_directory_of_another_rank_may_not_be_there_yet(tmp_path: Path) -> None:
    assert user_errors.why_unusable(tmp_path / "later", create=False) is None
    assert user_errors.why_unusable(tmp_path, create=False) is None
