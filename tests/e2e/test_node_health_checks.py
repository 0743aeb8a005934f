"""Ready checks, each in a process of its own: what they find, and what doesn't answer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron_ft.cli.main import main
from megatron_ft.cli.node_health.__main__ import check


def test_one_that_does_not_answer_is_named_and_holds_up_no_other() -> None:
    began_s = time.monotonic()
    found = check([("disk: /nfs", lambda: time.sleep(600) or []), ("gpu", lambda: ["gpu: one"]), ("net", list)], 0.3)
    assert found == ["disk: /nfs doesn't answer within 0.3 s", "gpu: one"]
    assert time.monotonic() - began_s < 60


def test_a_directory_is_written_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["node-health", "disk", f"--directory={tmp_path}"]) == 0
    assert os.listdir(tmp_path) == []
    assert main(["node-health", f"disk,disk:{tmp_path}/none", f"--directory={tmp_path}"]) == 1
    assert capfd.readouterr().out == f"disk: {tmp_path}/none: No such file or directory\n"
    assert main(["node-health", "disc"]) == 2
