"""A log directory whose file server has stopped answering: everything goes on, but for the logs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.launching import ROOT, Launcher

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = ROOT / "tests" / "support" / "silent_directory.c"
PROMPTLY_S = 20.0
"""What is done at once, on a machine however busy; what waits for the directory is never done."""
SCRIPT = """
from megatron_ft import RankMonitorClient
def end(*_):
    say("asked to end")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
client = RankMonitorClient()
client.init_workload_monitoring()
say("ready", CYCLE)
while CYCLE == 0 and not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if CYCLE == 0:
    client.start_section("step")
elif CYCLE == 1:
    raise RuntimeError("lost")
forever()
"""


@pytest.mark.skipif(COMPILER is None, reason="the directory is played by a library that is preloaded")
def test_silent_log_directory_delays_no_verdict_kill_restart_or_stop(fresh_launcher: Launcher, tmp_path: Path) -> None:
    """Neither a monitor that comes in another's place, nor a verdict, a kill, a crash, a restart or SIGTERM."""
    assert COMPILER is not None
    library, silent, go = tmp_path / "silent.so", tmp_path / "silent", tmp_path / "go"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    environment = {
        "LD_PRELOAD": str(library),
        "SILENT_DIRECTORY": str(tmp_path / "0" / "ft_logs"),
        "SILENT_FLAG": str(silent),
    }
    options = [
        "--standalone",
        "--nproc-per-node=1",
        "--max-restarts=2",
        "--ft-rank-section-timeouts=step:1",
        "--ft-preload=none",
        "--tee=3",
    ]
    launched = fresh_launcher.start(SCRIPT, *options, env=environment, script_args=[str(go)])
    launched.wait_for("ready 0$")
    silent.touch()
    os.kill(launched.monitor_pids()[0], signal.SIGKILL)
    launched.wait_for(r"the monitor of rank 0 exited \(SIGKILL\); replacing it", timeout_s=PROMPTLY_S)
    go.touch()
    launched.wait_for("cycle 0 ended: rank 0 hung in 'step'", timeout_s=PROMPTLY_S)
    launched.wait_for("cycle 1 ended: rank 0 raised RuntimeError: lost", timeout_s=PROMPTLY_S)
    launched.wait_for("^ready 2$", timeout_s=PROMPTLY_S)
    assert "ranks write to the launcher's output: their directory doesn't answer" in launched.err
    launched.signal(signal.SIGTERM)
    launched.wait_for("^asked to end$", timeout_s=PROMPTLY_S)
    finished = launched.wait(PROMPTLY_S)
    assert finished.code == 0
    assert "lost its last records: its directory doesn't answer" in finished.err
    assert silent.exists()
    launched.assert_nothing_left()
