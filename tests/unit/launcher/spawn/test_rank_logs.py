"""The files of one cycle's ranks: nobody's are deleted, and a disk that is full ends no job."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from megatron_ft.launcher.spawn.rank_logs import CycleLogs


def reify(specs: DefaultLogsSpecs, tmp_path: Path, *, cycle: int, restarts: int, said: list[str]) -> LogsDest:
    envs = {
        local_rank: {
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_RUN_ID": "run",
            "FT_CYCLE": str(cycle),
        }
        for local_rank in range(2)
    }
    files = CycleLogs(specs, run_dir=str(tmp_path / "run"), say=said.append, blocking=lambda made: made()).reify(envs)
    assert [env["TORCHELASTIC_ERROR_FILE"] for env in envs.values()] == list(files.error_files.values())
    assert {env["TORCHELASTIC_RESTART_COUNT"] for env in envs.values()} == {str(restarts)}, "the ranks read it"
    return files


def test_a_restart_that_is_not_counted_deletes_no_logs(tmp_path: Path) -> None:
    specs, said = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL), list[str]()
    first = reify(specs, tmp_path, cycle=4, restarts=1, said=said)
    Path(first.stdouts[0]).write_text("of cycle 4")
    second = reify(specs, tmp_path, cycle=5, restarts=1, said=said)
    assert Path(first.stdouts[0]).read_text() == "of cycle 4"
    directories = [Path(files.stdouts[0]).parent.parent for files in (first, second)]
    assert [path.name for path in directories] == ["attempt_4", "attempt_5"]
    assert directories[0].parent == directories[1].parent
    assert said == []


def test_files_that_cannot_be_made_cost_no_more_than_the_files(tmp_path: Path) -> None:
    specs, said = DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL, tee=Std.ERR), list[str]()
    reify(specs, tmp_path, cycle=0, restarts=0, said=said)
    shutil.rmtree(tmp_path / "logs")
    (tmp_path / "logs").touch()  # as good as a full disk, and root is refused, too
    files = reify(specs, tmp_path, cycle=1, restarts=1, said=said)
    assert (files.stdouts, files.stderrs) == ({0: "", 1: ""}, {0: "", 1: ""})
    assert (files.tee_stdouts, files.tee_stderrs) == ({}, {})
    assert list(files.error_files.values()) == [str(tmp_path / "run" / f"error-1-{each}.json") for each in range(2)]
    (warning,) = said
    assert warning.startswith("warning: could not create the ranks' log files")


def test_without_a_log_directory_errors_are_known_all_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    files = reify(DefaultLogsSpecs(log_dir=os.devnull), tmp_path, cycle=2, restarts=0, said=said)
    assert list(files.error_files.values()) == [str(tmp_path / "run" / f"error-2-{each}.json") for each in range(2)]
    assert (files.stdouts, said) == ({0: "", 1: ""}, [])
    assert {getattr(files, name, os.devnull) for name in ("filtered_stdout", "filtered_stderr")} == {os.devnull}
