"""``ft_launcher`` and its rank monitors: verdicts, requests of ranks, and monitors that are replaced."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from megatron_ft.link.linux.processes import read_stat
from tests.support.launching import Launcher, wait_until

pytestmark = pytest.mark.waits

TWO = ("--nproc-per-node", "2")
SECTIONS = ("--ft-param-rank_section_timeouts=step:{timeout}", "--ft-param-rank_out_of_section_timeout=30")
CLIENT = """
from megatron_ft import RankMonitorClient, WorkloadAction, WorkloadControlRequest
client = RankMonitorClient()
client.init_workload_monitoring()
"""


def sections(timeout: float) -> list[str]:
    return [option.format(timeout=timeout) for option in SECTIONS]


def test_rank_that_asks_and_is_killed_at_once_is_heard(launcher: Launcher) -> None:
    script = """
from megatron_ft.link.wire import connect
message = {"type": "workload_control", "action": "ShutdownWorkload", "description": "x", "rank": 0, "pid": 1}
connect(os.environ["FT_LAUNCHER_IPC_SOCKET"], 5).send(message)
os.kill(os.getpid(), signal.SIGKILL)
"""
    finished = launcher.run(script, "--max-restarts=3")
    assert finished.code == 1
    assert launcher.launches[0].ends() == [(0, "request", "give_up", 3)]
    (asked,) = launcher.launches[0].events("workload_control")
    assert (asked["action"], asked["description"]) == ("ShutdownWorkload", "x")


def test_lost_monitors_are_replaced_on_the_same_board(launcher: Launcher) -> None:
    script = (
        CLIENT
        + """
client.set_iteration(11)
say("ready")
while not os.path.exists("hang"):
    with client.section("step"):
        time.sleep(0.01)
client.start_section("step")
forever()
"""
    )
    launched = launcher.start(script, *sections(1))
    launched.wait_for("^ready")
    # the second one soon after the first: it has to wait a moment
    for how, told in ((signal.SIGKILL, r"exited \(SIGKILL\)"), (signal.SIGSTOP, "was stopped")):
        old = launched.monitor_pids()[0]
        os.kill(old, how)
        start = time.monotonic()
        launched.wait_for(rf"^\[ft_launcher\] the monitor of rank 0 {told}; (?:replacing it|starting another one)")
        assert time.monotonic() - start < 4.5
        wait_until(lambda old=old: {*launched.monitor_pids().values()} - {old} != set() and read_stat(old) is None, 10)
    (launched.directory / "hang").touch()
    finished = launched.wait()
    assert finished.code == 1
    assert [end[:2] for end in launched.ends()] == [(0, "hang")]
    (verdict,) = launched.events("verdict", "monitor")
    assert (verdict["section"], verdict["timeout_s"], verdict["iteration"]) == ("step", 1.0, 11)
    assert len(launched.events("monitor_replaced")) == 2


def test_monitors_live_as_long_as_the_job_and_a_run_directory_that_is_removed_is_made_again(launcher: Launcher) -> None:
    """Cleaners of /tmp do that to long jobs: a rank that connects later would find nobody, in every cycle anew."""
    script = (
        CLIENT
        + """
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
client.set_iteration(7)
client.start_section("step")
say("ready", CYCLE)
while CYCLE != 1 and not os.path.exists(f"go{CYCLE}"):
    time.sleep(0.01)
if CYCLE == 1:
    forever()
sys.exit(3 if CYCLE == 0 else 0)
"""
    )
    options = ("--max-restarts=2", "--ft-param-rank_termination_signal=SIGTERM")
    launched = launcher.start(script, *sections(1), *options)
    launched.wait_for("^ready 0")
    (run_dir,) = Path(launched.temp_dir).glob("megatron_ft-*")
    shutil.rmtree(run_dir)
    launched.wait_for(rf"^\[ft_launcher\] socket directory {run_dir} was deleted: recreated$")
    wait_until(
        lambda: (
            {path.name for path in run_dir.iterdir()} == {"keeper.sock", "launcher.sock", "monitor-0.sock", "owner"}
        ),
        10,
    )
    assert run_dir.stat().st_mode & 0o777 == 0o700
    (launched.directory / "go0").touch()
    launched.wait_for("^ready 1")
    monitors = launched.monitor_pids()
    launched.wait_for("^ready 2")
    assert launched.monitor_pids() == monitors
    (launched.directory / "go2").touch()
    finished = launched.wait()
    assert finished.code == 0, finished.err
    # the ranks of the next cycle are watched; one that outlives the verdict on it, and exits with 0, has failed
    assert launched.ends()[1][:2] == (0, "hang")
    assert launched.exits(1)[0][0] == 0
    assert {verdict["section"] for verdict in launched.events("verdict", "monitor")} == {"step"}


def test_run_directory_of_a_killed_launcher_is_removed_by_the_next_one(launcher: Launcher) -> None:
    first = launcher.start("say('ready')\nforever()")
    first.wait_for("^ready")
    (run_dir,) = Path(first.temp_dir).glob("megatron_ft-*")
    for stat in first.alive():  # as a power cut: nobody has time for anything
        os.kill(stat.pid, signal.SIGSTOP)
    for stat in first.alive():
        os.kill(stat.pid, signal.SIGKILL)
    first.process.wait(30)
    assert run_dir.exists()
    launcher.run("pass", env={"TMPDIR": first.temp_dir})
    assert not run_dir.exists()
