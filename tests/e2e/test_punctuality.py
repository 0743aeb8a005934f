"""``--ft-startup-timeout`` and ``--ft-exit-timeout``: what no board shows, before the monitoring and after it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from tests.support.launching import Launcher, launcher

__all__ = ["launcher"]

TWO = ("--nproc-per-node", "2")
CLIENT = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
"""


def test_rank_that_does_not_start_monitoring_is_killed_and_named(launcher: Launcher) -> None:
    script = (
        CLIENT
        + """
if CYCLE == 0 and RANK == 1:
    forever()
client.init_workload_monitoring()
if CYCLE == 0:
    forever()
client.shutdown_workload_monitoring()
"""
    )
    launched = launcher.start(script, *TWO, "--ft-startup-timeout=4", "--max-restarts=1")
    finished = launched.wait()
    assert len(finished.lines) == 4, "each cycle starts, and ends"
    assert finished.code == 0
    (verdict,) = launched.events("verdict")
    assert (verdict["kind"], verdict["rank"], verdict["timeout_s"]) == ("startup", 1, 4.0)
    assert 4 <= verdict["elapsed_s"] < 8
    assert launched.ends() == [(1, "hang", "restart", 0), (None, None, "finish", 0)]
    assert launched.exits()[1] == (-9, True)


def test_ranks_that_do_not_exit_after_their_shutdown_have_failed(launcher: Launcher) -> None:
    script = (
        CLIENT
        + """
client.init_workload_monitoring()
client.set_iteration(9)
client.shutdown_workload_monitoring()
if CYCLE == 0:
    forever()
"""
    )
    finished = launcher.run(script, *TWO, "--ft-exit-timeout=2", "--max-restarts=1")
    assert finished.code == 0
    (launched,) = launcher.launches
    # one may wait for the other
    assert launched.ends() == [(None, "hang", "restart", 0), (None, None, "finish", 0)]
    assert launched.events("cycle_ended")[0]["iteration"] == 9
    assert {(each["kind"], each["timeout_s"]) for each in launched.events("verdict")} == {("exit", 2.0)}
    assert "candidates: rank 0 in script.py:8 forever; rank 1 in script.py:8 forever" in finished.err


def test_startup_timeout_accuses_the_stopped_rank_else_nobody(launcher: Launcher) -> None:
    """They may wait for each other: one of them in ``init_process_group``, before any board is there."""
    script = """
if CYCLE == 1 and RANK == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if CYCLE < 2:
    forever()
"""
    finished = launcher.run(script, *TWO, "--ft-startup-timeout=3", "--max-restarts=2")
    assert finished.code == 0
    (launched,) = launcher.launches
    assert launched.ends() == [(None, "hang", "restart", 1), (1, "hang", "restart", 0), (None, None, "finish", 0)]
    assert {(each["kind"], each["timeout_s"]) for each in launched.events("verdict")} == {("startup", 3.0)}
    first, second = (line for line in finished.lines if " ended: " in line)
    assert "candidates: rank 0; rank 1" in first
    assert "process stopped" in second


def test_rank_that_does_not_exit_when_the_others_have_finished_counts_as_finished(launcher: Launcher) -> None:
    script = (
        CLIENT
        + """
client.init_workload_monitoring()
client.shutdown_workload_monitoring()
if RANK == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forever()
"""
    )
    launched = launcher.start(script, *TWO, "--ft-exit-timeout=4", "--max-restarts=1")
    finished = launched.wait()
    assert finished.code == 0
    assert len(finished.lines) == 3
    assert "rank 1 did not exit within 4 s" in finished.lines[1]
    assert [end[1:3] for end in launched.ends()] == [(None, "finish")]
    assert launched.exits() == {0: (0, False), 1: (-9, True)}
    (detached, _) = launched.events("detached", role="monitor")
    assert detached["cycle"] == 0


def test_rank_that_does_not_exit_while_another_works_has_failed(launcher: Launcher) -> None:
    script = (
        CLIENT
        + """
client.init_workload_monitoring()
if CYCLE == 0 and RANK == 0:
    forever()
client.shutdown_workload_monitoring()
if CYCLE == 0 and RANK == 1:
    forever()
"""
    )
    finished = launcher.run(script, "--nproc-per-node=3", "--ft-exit-timeout=2", "--max-restarts=1")
    assert finished.code == 0
    (launched,) = launcher.launches
    assert launched.ends()[0] == (1, "hang", "restart", 0)
    (verdict,) = launched.events("verdict")
    assert (verdict["rank"], verdict["kind"], verdict["timeout_s"]) == (1, "exit", 2.0)
    assert "in script.py:" in finished.lines[1]


def test_monitoring_that_begins_again_is_no_exit(launcher: Launcher) -> None:
    script = (
        CLIENT
        + """
client.init_workload_monitoring()
client.shutdown_workload_monitoring()
time.sleep(0.3)
client.init_workload_monitoring()
time.sleep(4)
client.shutdown_workload_monitoring()
"""
    )
    finished = launcher.run(script, "--ft-exit-timeout=3")
    assert (finished.code, len(finished.lines)) == (0, 2)
    assert launcher.launches[0].events("verdict") == []


def test_late_exit_under_observe_only_kills_no_rank(launcher: Launcher) -> None:
    script = (
        CLIENT
        + """
client.init_workload_monitoring()
client.shutdown_workload_monitoring()
while not os.path.exists("go"):
    time.sleep(0.01)
"""
    )
    launched = launcher.start(script, "--ft-exit-timeout=0.2", "--ft-observe-only")
    after = r"after shutdown_workload_monitoring\(\) \(--ft-exit-timeout\)"
    launched.wait_for(rf"did not exit within 0\.2 s {after}: not killed \(observe-only\)")
    (launched.directory / "go").touch()
    assert launched.wait().code == 0
    (verdict,) = launched.events("verdict")
    assert verdict["observed_only"] is True


def test_time_in_which_the_whole_node_was_stopped_counts_for_nobody(launcher: Launcher) -> None:
    """It is over before the launcher's timer is due, so no timer of its is late."""
    script = (
        CLIENT
        + """
client.init_workload_monitoring()
client.shutdown_workload_monitoring()
say("leaving")
for _ in range(100):
    time.sleep(0.01)  # stopped in it, the rank still has all the others before it
"""
    )
    launched = launcher.start(script, "--nproc-per-node=1", "--ft-exit-timeout=4")
    launched.wait_for("^leaving")
    everybody = [stat.pid for stat in launched.alive()]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everybody:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(3.5 * (number == signal.SIGSTOP))
    finished = launched.wait()
    assert finished.code == 0, finished.err
