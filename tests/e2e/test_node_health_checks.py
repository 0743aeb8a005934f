"""Ready checks, each in a process of its own: what they find, and what doesn't answer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli import node_health
from megatron_ft.cli.main import main
from megatron_ft.cli.node_health import check


def test_check_that_does_not_answer_is_named_and_delays_no_other() -> None:
    began_s = time.monotonic()
    found = check([("disk: /nfs", lambda: time.sleep(600) or []), ("gpu", lambda: ["gpu: one"]), ("net", list)], 0.3)
    assert found == ["disk: /nfs doesn't answer within 0.3 s", "gpu: one"]
    assert time.monotonic() - began_s < 60


def test_directories_of_the_job_are_written_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_JOB_DIRECTORIES", f"{tmp_path}")
    assert main(["node-health", "storage,disk"]) == 0
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv("FT_JOB_DIRECTORIES", f"{tmp_path}:{tmp_path}/gone")
    assert main(["node-health", f"storage,disk:{tmp_path}/none"]) == 1
    gone, none = capfd.readouterr().out.strip().split("; ")
    assert gone == f"storage: {tmp_path}/gone: No such file or directory"
    assert none == f"disk: {tmp_path}/none: No such file or directory"
    assert main(["node-health", "disc"]) == 2
    assert "did you mean 'disk'" in capfd.readouterr().err


def test_mark_of_a_segment_is_read_from_a_regular_file_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "20")
    command = ["node-health", "segment", f"--segment-health-check-dir={tmp_path}"]
    mark = tmp_path / "segment_health_check.20.20"
    os.mkfifo(mark)
    assert main([*command, "--bound=60"]) == 0
    mark.unlink()
    mark.symlink_to(mark)
    assert main(command) == 1
    assert capfd.readouterr().out == f"segment: {mark}: Too many levels of symbolic links\n"


def test_network_file_system_that_does_not_answer_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [f"40 22 0:35 / {path} rw - nfs4 server:/x rw" for path in ("/stuck", "/gone", tmp_path)]
    (tmp_path / "mountinfo").write_text("\n".join(mounts))
    monkeypatch.setattr(node_health, "_MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setattr(node_health, "_SYS", tmp_path)
    scandir = os.scandir

    def look_into(path: str) -> Any:
        if path == "/stuck":
            time.sleep(600)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", look_into)
    began_s = time.monotonic()
    assert main(["node-health", "mounts", "--bound=1"]) == 1
    assert time.monotonic() - began_s < 60
    told = capfd.readouterr().out.strip()
    assert told == "mounts: /stuck doesn't answer within 1 s; mounts: /gone: No such file or directory"
