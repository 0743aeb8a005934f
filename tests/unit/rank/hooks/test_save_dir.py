"""A save directory that can't be written: one line, no restart, no rank that waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.core.control import WorkloadAction
from megatron_ft.core.errors import RankMonitorClientError
from megatron_ft.rank.hooks import save_dir
from tests.support.training import (
    FakeClient,
    bench,
    clean_environment,
    client,
    start,
)

__all__ = ["bench", "clean_environment", "client"]  # fixtures


def unusable_directories(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "deep")
    return {
        "under a file": tmp_path / "file" / "ckpt",
        "a file": tmp_path / "file",
        "a dangling link": tmp_path / "dangling",
        "a directory that takes no file": Path("/proc"),
        "in a directory that takes none": Path("/proc/ckpt"),
    }


@pytest.mark.parametrize("kind", ["under a file", "a file", "a dangling link", "a directory that takes no file"])
def test_unusable_save_directory_ends_the_job_with_one_line(
    kind: str, tmp_path: Path, client: FakeClient, capfd: pytest.CaptureFixture[str]
) -> None:
    save = unusable_directories(tmp_path)[kind]
    state = ft.GlobalState.create(save=str(save), ft=ft.FaultToleranceSettings())
    with pytest.raises(SystemExit) as exit_info:
        ft.setup(state.cfg, state)
    assert exit_info.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(save) in err
    (request,) = [c[1] for c in client.calls if c[0] == "request"]
    assert request.action is WorkloadAction.ShutdownWorkload
    assert str(save) in request.description
    assert "\n" not in request.description
    assert not client.is_initialized
    assert state.rank_monitor_client is None


def test_other_ranks_see_an_unusable_save_directory_too_and_are_quiet(
    tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    state = ft.GlobalState.create(
        save=str(unusable_directories(tmp_path)["under a file"]), ft=ft.FaultToleranceSettings()
    )
    with pytest.raises(SystemExit):
        ft.setup(state.cfg, state)
    assert capfd.readouterr() == ("", "")
    assert [c[0] for c in client.calls] == ["request", "shutdown"]


def test_a_launcher_that_doesnt_answer_changes_nothing(
    tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Any) -> None:
        raise RankMonitorClientError("no launcher")

    monkeypatch.setattr(client, "send_workload_control_request", refuse)
    state = ft.GlobalState.create(save=str(unusable_directories(tmp_path)["a file"]), ft=ft.FaultToleranceSettings())
    with pytest.raises(SystemExit):
        ft.setup(state.cfg, state)


def test_a_full_disk_doesnt_end_the_job(tmp_path: Path, client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_dir, "_probe", full)
    start(tmp_path)
    assert client.open == ["setup"]


def test_save_directory_of_another_rank_may_not_be_there_yet(tmp_path: Path) -> None:
    assert save_dir.why_unusable(tmp_path / "later", create=False) is None
    assert save_dir.why_unusable(tmp_path, create=False) is None
