"""Restarts are counted once for the whole job, and a node that leaves or dies costs no more than one."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.e2e.test_membership import SCRIPT, cycles_of, tell
from tests.support.launching import START_S, Launched, Launcher, launcher, wait_until
from tests.support.nodes import meeting_place, wait_for_all

__all__ = ["launcher"]

MISSED_S = 15.0
"""6 s, by default and with ranks that notice nothing by themselves; the rest is for a busy machine. torch: never."""


def start(launcher: Launcher, number: int, *options: str) -> Launched:
    """The first one's launcher starts the coordinator."""
    where = str(launcher.directory)
    return launcher.start(SCRIPT, *options, f"--rdzv-conf=is_host={int(not number)}", script_args=[where])


def ended_s(node: Launched, cycle: int) -> float:
    """When that cycle ended there."""
    wait_until(lambda: any(event["cycle"] == cycle for event in node.events("cycle_ended")), START_S)
    return float(next(e["t"] for e in node.events("cycle_ended") if e["cycle"] == cycle)) / 1e9


def left_after(node: Launched, cycle: int) -> tuple[str, int]:
    """What follows from the end of that cycle, and how many restarts are left then."""
    ended_s(node, cycle)
    (event,) = [event for event in node.events("cycle_ended") if event["cycle"] == cycle]
    return event["action"], event["restarts_left"]


def test_a_replaced_launcher_does_not_reset_the_count(launcher: Launcher) -> None:
    place = meeting_place("--nnodes=2", "--max-restarts=3")
    nodes = [start(launcher, number, *place) for number in range(2)]
    for node in nodes:
        node.wait_for("^cycle 0 of . in 2")
    tell(launcher, "fail-0-0")
    for node in nodes:
        assert left_after(node, 0) == ("restart", 2)
        node.wait_for("^cycle 1 of . in 2")
    nodes[1].process.kill()
    killed_s = time.monotonic()
    nodes[1].process.wait()
    # the scheduler starts it again with the same command
    nodes[1] = start(launcher, 1, *place)
    assert left_after(nodes[0], 1) == ("restart", 1)
    assert ended_s(nodes[0], 1) - killed_s < MISSED_S
    for node in nodes:
        node.wait_for("^cycle 2 of . in 2")
    tell(launcher, "fail-2-1")
    for node in nodes:
        assert left_after(node, 2) == ("restart", 0)
        node.wait_for("^cycle 3 of . in 2")
    tell(launcher, "fail-3-0")
    ended = wait_for_all(nodes)
    assert [finished.code for finished in ended] == [1, 1]
    assert [left_after(node, 3) for node in nodes] == [("give_up", 0)] * 2
    assert [cycles_of(node) for node in nodes] == [["0", "1", "2", "3"], ["2", "3"]]
    told = [{event["cycle"]: event["restarts_left"] for event in node.events("cycle_started")} for node in nodes]
    assert told == [{0: 3, 1: 2, 2: 1, 3: 0}, {2: 1, 3: 0}]


def test_a_launcher_that_is_asked_to_stop_leaves_the_others_to_go_on(launcher: Launcher) -> None:
    # ranks that notice nothing by themselves
    place = meeting_place("--nnodes=2:3", "--max-restarts=3")
    nodes = [start(launcher, number, *place) for number in range(3)]
    for node in nodes:
        node.wait_for("^cycle 0 of . in 3")
    nodes[2].signal(signal.SIGTERM)
    assert nodes[2].wait().code == 1
    for node in nodes[:2]:
        why = r"node \d \(.+\): its launcher received SIGTERM"
        node.wait_for(rf"cycle 0 ended: {why}; restarting as cycle 1, 2 of 3 restarts left")
        node.wait_for("^cycle 1 of . in 2")
    tell(launcher, "finish")
    assert [finished.code for finished in wait_for_all(nodes[:2])] == [0, 0]


def test_launchers_that_are_all_asked_to_stop_end_well_if_their_ranks_do(launcher: Launcher) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
say("ready")
forever()
"""
    place = meeting_place("--nnodes=2", "--max-restarts=3")
    # the second one starts the coordinator and has place 0: without it the first one couldn't go on
    nodes = [launcher.start(script, *place, f"--rdzv-conf=is_host={number}") for number in range(2)]
    for node in nodes:
        node.wait_for("^ready")
    nodes[0].signal(signal.SIGTERM)
    nodes[0].wait_for("stopped by SIGTERM, all ranks exited with 0")
    # the first one has ended; nothing of that ends the other one's ranks
    assert nodes[0].wait().code == 0
    with pytest.raises(subprocess.TimeoutExpired):
        nodes[1].process.wait(1)
    nodes[1].signal(signal.SIGTERM)
    ended = wait_for_all(nodes)
    assert ended[0].code == 0
    assert "restarting as" not in ended[1].err
