"""Who reads the launcher's output is stopped (Ctrl-S, a file server that hangs): the job goes on, and ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from tests.support.launching import clean_environment

SCRIPT = """
import os, sys
with open(sys.argv[1], "a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\\n")
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


def test_a_job_whose_output_is_not_read_restarts_and_ends(tmp_path: Path) -> None:
    script, seen = tmp_path / "script.py", tmp_path / "seen"
    script.write_text(SCRIPT)
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    command = [sys.executable, "-m", "megatron_ft.launcher", "--standalone", "--nproc-per-node=1", "--max-restarts=3"]
    environment = {**clean_environment(), "TMPDIR": str(tmp_path)}
    environment.pop("PYTHONUNBUFFERED", None)  # else no stream has a lock that a stuck thread could hold
    launcher = subprocess.Popen([*command, str(script), str(seen)], stdout=write, stderr=write, env=environment)
    os.close(write)
    try:
        assert launcher.wait(60) == 0
        assert seen.read_text().split() == ["0", "1"]
        assert [path.name for path in tmp_path.glob("megatron_ft-*")] == []
    finally:
        launcher.kill()
        launcher.wait()
        os.close(read)
