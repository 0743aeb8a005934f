"""What a job leaves for scripts: its exit code, and ``result.json`` with one record for each of its lives."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Launched, Launcher, launcher, wait_until
from tests.support.nodes import meeting_place, rendezvous_settings, wait_for_all

__all__ = ["launcher"]

STUCK = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
for iteration in range(10):
    client.set_iteration(iteration)
    if iteration == 3:
        os._exit(7)
"""
WAITS = """
signal.signal(signal.SIGTERM, lambda *_: os._exit({code}))
say("ready")
forever()
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


@pytest.mark.parametrize("code", [0, 1])
def test_result_of_a_stopped_job_is_stopped_whatever_its_code(launcher: Launcher, code: int) -> None:
    launched = launcher.start(WAITS.format(code=code))
    launched.wait_for("^ready")
    wait_until((launched.log_dir / "result.json").exists, 30)  # it is written beside the start of the ranks
    assert result(launched.log_dir)["lives"][0]["outcome"] == "running"
    launched.signal(signal.SIGTERM)
    assert launched.wait().code == code
    (life,) = result(launched.log_dir)["lives"]
    assert (life["outcome"], life["exit_code"]) == ("stopped", code)
    assert life["cause"].startswith("stopped by SIGTERM, ")


def test_a_training_that_says_when_it_is_finished_has_more_to_do_until_then(launcher: Launcher, tmp_path: Path) -> None:
    flag = {"FAULT_TOL_FINISHED_FLAG_FILE": str(tmp_path / "finished")}
    launched = launcher.start("pass", env=flag)
    assert launched.wait().code == 0
    assert result(launched.log_dir)["lives"][0]["outcome"] == "stopped"
    script = 'open(os.environ["FAULT_TOL_FINISHED_FLAG_FILE"], "w").close()'
    launched = launcher.start(script, env=flag)
    assert launched.wait().code == 0
    assert result(launched.log_dir)["lives"][0]["outcome"] == "finished"


def start_two(launcher: Launcher, script: str, *options: str) -> tuple[list[Launched], Path]:
    logs = launcher.directory / "logs"
    shared = [*meeting_place(rendezvous_settings()), "--nnodes=2", f"--ft-log-dir={logs}", *options]
    return [launcher.start(script, *shared, f"--node-rank={rank}") for rank in range(2)], logs


def test_result_has_a_single_record_for_all_nodes(launcher: Launcher) -> None:
    script = "os._exit(5 if CYCLE == 0 and RANK == 1 else 0)"
    nodes, logs = start_two(launcher, script, "--max-restarts=1")
    assert [ended.code for ended in wait_for_all(nodes)] == [0, 0]
    (life,) = result(logs)["lives"]
    assert (life["outcome"], life["nodes"], life["cycles"], life["restarts"]) == ("finished", 2, 2, 1)
    (fault,) = life["faults"]
    assert (fault["kind"], fault["text"], fault["cycle"]) == ("rank", "rank 1 exited with code 5", 0)


def test_the_end_is_told_even_where_the_first_node_is_gone(launcher: Launcher) -> None:
    options = ["--max-restarts=0", "--rdzv-conf=join_timeout=3"]
    nodes, logs = start_two(launcher, 'say("ready"); forever()', *options)
    for node in nodes:
        node.wait_for("^ready")
    nodes[0].signal(signal.SIGKILL)
    codes = [ended.code for ended in wait_for_all(nodes)]
    (life,) = result(logs)["lives"]
    if codes[1] == 1:
        assert (life["exit_code"], life["outcome"]) == (1, "failed")
    else:  # it can't know whether the other node goes on
        assert (life["exit_code"], life["outcome"], life["left"][0]["exit_code"]) == (None, "running", 94)
    assert (life["cycles"], life["nodes"]) == (1, 2)
