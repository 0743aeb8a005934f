"""What a job leaves for scripts: its exit code, and ``result.json`` with one record for each of its lives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.launching import Launcher

STUCK = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
for iteration in range(10):
    client.set_iteration(iteration)
    if iteration == 3:
        os._exit(7)
"""
AFTER_ITS_RUN = """
import atexit
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
for iteration in range(4):
    client.set_iteration(iteration)
client.shutdown_workload_monitoring()
how = {ends}.get((RANK, CYCLE))
if how == "raises":
    raise RuntimeError("the tracker can't upload")
if how == "exits":
    sys.exit(3)
if how is not None:
    crash = {{"crashes": lambda: os.kill(os.getpid(), 11), "aborts": os.abort, "leaves": lambda: os._exit(1)}}[how]
    atexit.register(crash)
"""


def result(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


def test_a_life_that_gets_no_further_ends_with_93(launcher: Launcher) -> None:
    logs = launcher.directory / "logs"
    assert launcher.run(STUCK, "--max-restarts=2", f"--ft-log-dir={logs}").code == 1
    same = [str(launcher.directory / "0" / "script.py")]
    assert launcher.run(same, "--max-restarts=2", f"--ft-log-dir={logs}").code == 93
    first, second = result(logs)["lives"]
    assert (first["outcome"], first["exit_code"], first["restarts"], first["iteration"]) == ("failed", 1, 2, 3)
    assert first["cause"] == "rank 0 exited with code 7 after iteration 3; no restarts left, giving up"
    assert (second["outcome"], second["exit_code"], second["restarts"]) == ("no_progress", 93, 0)
    assert result(logs)["bad_nodes"] == {}
    assert second["began"] >= first["ended"] >= first["began"]


def test_a_training_that_says_when_it_is_finished_has_more_to_do_until_then(launcher: Launcher, tmp_path: Path) -> None:
    flag = {"FAULT_TOL_FINISHED_FLAG_FILE": str(tmp_path / "finished")}
    launched = launcher.start("pass", env=flag)
    assert launched.wait().code == 0
    assert result(launched.log_dir)["lives"][0]["outcome"] == "stopped"
    script = 'open(os.environ["FAULT_TOL_FINISHED_FLAG_FILE"], "w").close()'
    launched = launcher.start(script, env=flag)
    assert launched.wait().code == 0
    assert result(launched.log_dir)["lives"][0]["outcome"] == "finished"


def test_failure_after_a_run_restarts_the_job_and_a_crash_while_the_interpreter_exits_does_not(
    launcher: Launcher,
) -> None:
    ends = {(1, 0): "raises", (1, 1): "exits", (0, 2): "leaves", (1, 2): "crashes", (2, 2): "aborts"}
    job = launcher.run(AFTER_ITS_RUN.format(ends=ends), "--nproc-per-node=4", "--max-restarts=3")
    causes = [end["cause"] for end in launcher.launches[0].events("cycle_ended")]
    assert [cause and cause["text"] for cause in causes] == [
        "rank 1 raised RuntimeError: the tracker can't upload",
        "rank 1 exited with code 3",
        None,
    ]
    lines = {line for line in job.lines if "after its run" in line}
    assert lines == {
        "rank 0 exited with code 1 after its run had ended",
        "rank 1 crashed with SIGSEGV after its run had ended",
        "rank 2 crashed with SIGABRT after its run had ended",
    }
    assert job.code == 0
