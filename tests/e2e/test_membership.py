"""A node that was lost and returns: a healthy cycle isn't disturbed, the next restart uses it."""

from __future__ import annotations

import signal

import pytest

from tests.support.launching import Launcher
from tests.support.nodes import (
    TRAINS_UNTIL_TOLD,
    cycles_of,
    meeting_place,
    tell,
    wait_for_all,
)

pytestmark = pytest.mark.waits

STANDS_BY = "on standby for the next restart: {} without this one"


def test_a_launcher_that_was_frozen_is_done_without_and_stands_by(launcher: Launcher) -> None:
    place = meeting_place("--nnodes=2:3", "--max-restarts=2", "--ft-node-lost-timeout=5")
    nodes = [
        launcher.start(
            TRAINS_UNTIL_TOLD,
            *place,
            f"--rdzv-conf=is_host={int(not number)}",
            script_args=[str(launcher.directory)],
        )
        for number in range(3)
    ]
    for node in nodes:
        node.wait_for("^cycle 0 of . in 3")
    nodes[2].signal(signal.SIGSTOP)
    for node in nodes[:2]:
        node.wait_for(
            r"cycle 0 ended: node \d \(.+\): no message from its launcher for [5-7]\.\d s; restarting as cycle 1, 1 of"
        )
        node.wait_for("^cycle 1 of . in 2")
    nodes[2].signal(signal.SIGCONT)
    nodes[2].wait_for(STANDS_BY.format("2 nodes run"))
    assert "the other nodes declared this one lost" in nodes[2].err
    for node in nodes[:2]:
        node.wait_for("1 node on standby for the next restart: ")
    tell(launcher, "fail-1-0")
    for node in nodes:
        node.wait_for("^cycle 2 of . in 3")
    tell(launcher, "finish")
    assert [finished.code for finished in wait_for_all(nodes)] == [0, 0, 0]
    assert [cycles_of(node) for node in nodes] == [["0", "1", "2"], ["0", "1", "2"], ["0", "2"]]
