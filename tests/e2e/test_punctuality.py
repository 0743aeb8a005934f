"""``--ft-startup-timeout`` and ``--ft-exit-timeout``: what no board shows, before the monitoring and after it."""

from __future__ import annotations

import pytest

from tests.support.launching import Launcher

pytestmark = pytest.mark.waits

TWO = ("--nproc-per-node", "2")
CLIENT = """
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
"""


def test_rank_that_starts_late_or_does_not_exit_is_killed_and_counts_as_finished_only_where_the_others_have(
    launcher: Launcher,
) -> None:
    script = (
        CLIENT
        + """
if CYCLE == 0 and RANK == 1:
    forever()
client.init_workload_monitoring()
if CYCLE == 0:
    forever()
client.set_iteration(9)
client.shutdown_workload_monitoring()
if CYCLE == 1:
    forever()
if RANK == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forever()
"""
    )
    launched = launcher.start(script, *TWO, "--ft-startup-timeout=4", "--ft-exit-timeout=3", "--max-restarts=2")
    finished = launched.wait()
    assert finished.code == 0
    verdict, *others = launched.events("verdict")
    assert (verdict["kind"], verdict["rank"], verdict["timeout_s"]) == ("startup", 1, 4.0)
    assert 4 <= verdict["elapsed_s"] < 8
    assert launched.exits()[1] == (-9, True)
    # in cycle 1 one may wait for the other
    assert launched.ends() == [(1, "hang", "restart", 1), (None, "hang", "restart", 0), (None, None, "finish", 0)]
    assert launched.events("cycle_ended")[1]["iteration"] == 9
    assert {(each["kind"], each["timeout_s"]) for each in others} == {("exit", 3.0)}
    assert "candidates: rank 0 in script.py:8 forever; rank 1 in script.py:8 forever" in finished.err
    assert launched.exits(2) == {0: (0, False), 1: (-9, True)}
    assert len(finished.lines) == 7, "each cycle starts, and ends"
    assert "rank 1 did not exit within 3 s" in finished.lines[5]
    assert [each["cycle"] for each in launched.events("detached", role="monitor")].count(2) == 2
