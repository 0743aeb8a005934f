"""The files of one cycle's ranks: none are deleted, lines are whole, and a disk that is full ends no job."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from megatron_ft.launcher.processes.rank_logs import CycleLogs, inherited_streams, taken_from


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


def test_cycle_log_has_whole_lines_of_the_output_that_would_go_to_the_launcher(tmp_path: Path) -> None:
    said: list[str] = []
    specs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL, tee=Std.ALL)
    files = specs.reify({rank: {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "x"} for rank in (0, 1)})
    envs = {
        0: {"FT_CYCLE": "2", "RANK": "9", "WORLD_SIZE": "11"},
        1: {"FT_CYCLE": "2", "RANK": "10", "WORLD_SIZE": "11"},
    }
    streams = taken_from(files, envs, prefix=str(tmp_path / "new" / "out"), say=said.append)
    assert (files.tee_stdouts, files.tee_stderrs) == ({}, {})
    assert len(streams) == 4
    for part in ("a", "b\n", "c\n", "d"):
        for stream in streams[:2]:
            stream.write(part)
    for stream in streams:
        stream.stop()
    lines = [f"{rank}: {line}" for line in ("ab", "c", "d") for rank in (" 9", "10")]
    assert (tmp_path / "new" / "out_cycle2.log").read_text().splitlines() == lines
    assert said == []


@pytest.mark.parametrize(
    ("options", "streams"),
    [
        ({}, {1, 2}),
        ({"redirects": "3"}, set()),
        ({"redirects": "1", "tee": "2"}, set()),
        ({"redirects": "0:3,1:2"}, {1}),
        ({"redirects": "0:3", "local_ranks_filter": "0"}, set()),
        ({"redirects": "3", "log_dir": os.devnull}, {1, 2}),
        ({"redirects": "3", "logs_specs": "mine"}, {1, 2}),
    ],
)
def test_the_streams_that_ranks_share_with_the_launcher_follow_from_torchrun_s_options(
    options: dict[str, str], streams: set[int]
) -> None:
    given = {"redirects": "0", "tee": "0", "local_ranks_filter": None, "log_dir": "/logs", "logs_specs": None}
    assert inherited_streams(Namespace(**{**given, **options}), 2) == streams
