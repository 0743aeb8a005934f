"""Ready checks, each in a process of its own: what they find, and what doesn't answer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

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
