"""What coordinates the job is lost: its process, or the host of its launcher. Training goes on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

import pytest

from tests.support.launching import Launched, Launcher, wait_until
from tests.support.netns import Hosts
from tests.support.nodes import TRAINS_UNTIL_TOLD, coordinator_of, meeting_place, tell, wait_for_all

pytestmark = pytest.mark.waits


def start(
    launcher: Launcher, nodes: list[Launched], options: Sequence[str], count: int = 1, *, host: int | None = None
) -> None:
    """Start so many more nodes."""
    for _ in range(count):
        words = [*options, "--max-restarts=3", f"--node-rank={len(nodes)}"]
        nodes.append(launcher.start(TRAINS_UNTIL_TOLD, *words, script_args=[str(launcher.directory)], host=host))


def train(nodes: Sequence[Launched], cycle: int) -> None:
    """Wait for the ranks of these nodes, in their order."""
    for rank, node in enumerate(nodes):
        node.wait_for(rf"^cycle {cycle} of {rank} in {len(nodes)} at ")


def finish(launcher: Launcher, nodes: Sequence[Launched]) -> None:
    """The ranks end with 0, and so does each of these launchers."""
    tell(launcher, "finish")
    assert [finished.code for finished in wait_for_all(nodes)] == [0] * len(nodes)


def test_coordinator_is_killed_and_no_cycle_ends(launcher: Launcher) -> None:
    nodes: list[Launched] = []
    start(launcher, nodes, meeting_place("--nnodes=2"), 2)
    train(nodes, 0)
    # on one machine whichever of them is first at the endpoint has it
    ((host, pid),) = [(node, pid) for node in nodes if (pid := coordinator_of(node)) is not None]
    os.kill(pid, signal.SIGKILL)
    host.wait_for(r"the coordinator at 127\.0\.0\.1:\d+ exited .*SIGKILL.*; another one takes over")
    wait_until(lambda: coordinator_of(host) not in (None, pid), 20)
    # the new one is told all that the old one knew, whether that is before the failure or with it
    tell(launcher, "fail-0-1")
    train(nodes, 1)
    assert "cycle 0 ended: rank 1 exited with code 7; restarting as cycle 1, 2 of 3 restarts left" in nodes[1].err
    assert [len(re.findall("cycle . ended", node.err)) for node in nodes] == [1, 1]
    finish(launcher, nodes)


def test_host_of_the_coordinator_is_lost_and_the_job_goes_on_once_a_launcher_is_there_again(
    launcher: Launcher, hosts: Hosts
) -> None:
    nodes: list[Launched] = []
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job", "--nnodes=3"]
    for number in (1, 2, 3):
        start(launcher, nodes, place, host=hosts.inhabitant(number))
    train(nodes, 0)
    start(launcher, nodes, place, host=hosts.inhabitant(4))
    first, *others, spare = nodes
    spare.wait_for("on standby for the next restart: 3 nodes run without this one")
    hosts.power_off(1, first)
    hosts.heal(1)
    start(launcher, nodes, place, host=hosts.inhabitant(1))
    for node in [*others, spare]:
        node.wait_for("^cycle 1 of . in 3")
    again = nodes[4]
    again.wait_for("on standby for the next restart")
    assert re.search(r"cycle 0 ended: node 0.*: no message from its launcher for 15\.\d s", spare.err + others[0].err)
    finish(launcher, [*others, spare, again])
