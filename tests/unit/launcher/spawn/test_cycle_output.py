"""One file with what all ranks of a cycle write: whole lines, and none that a full disk would end a job for."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from megatron_ft.launcher.spawn.cycle_output import CopiedStream, cycle_file, taken_from


@pytest.mark.parametrize(
    ("prefix", "path"),
    [("/logs/job.log", "/logs/job_cycle3.log"), ("/logs/a.b/job", "/logs/a.b/job_cycle3.log")],
)
def test_its_name(prefix: str, path: str) -> None:
    assert cycle_file(prefix, 3) == path


def test_lines_of_several_ranks_are_whole(tmp_path: Path) -> None:
    path, said = str(tmp_path / "new" / "out.log"), list[str]()
    streams = [CopiedStream("", path, rank=rank, say=said.append) for rank in (" 0", "10")]
    for part in ("a", "b\n", "c\n", "d"):
        for stream in streams:
            stream.write(part)
    for stream in streams:
        stream.stop()
    lines = [f"{rank}: {line}" for line in ("ab", "c", "d") for rank in (" 0", "10")]
    assert Path(path).read_text().splitlines() == lines
    assert said == []


def test_one_that_can_t_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = list[str]()
    stream = CopiedStream("", str(tmp_path / "file" / "out.log"), rank="0", say=said.append)
    for _ in range(3):
        stream.write("line\n")
    stream.stop()
    assert len(said) == 1
    assert said[0].startswith(f"--ft-per-cycle-applog-prefix: {tmp_path}/file/out.log can't be written: ")


def test_it_takes_what_would_go_to_the_launcher(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL, tee=Std.ALL)
    files = specs.reify({rank: {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "x"} for rank in (0, 1)})
    envs = {
        0: {"FT_CYCLE": "2", "RANK": "8", "WORLD_SIZE": "11"},
        1: {"FT_CYCLE": "2", "RANK": "9", "WORLD_SIZE": "11"},
    }
    streams = taken_from(files, envs, prefix=str(tmp_path / "out.log"), say=print)
    assert (files.tee_stdouts, files.tee_stderrs) == ({}, {})
    assert len(streams) == 4
    streams[0].write("x\n")
    for stream in streams:
        stream.stop()
    assert (tmp_path / "out_cycle2.log").read_text() == " 8: x\n"
