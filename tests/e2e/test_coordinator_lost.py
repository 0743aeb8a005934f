"""What coordinates the job is lost: the process, its launcher, its host, or the way to it. Training goes on.

Ranks notice nothing of each other here. The times are those of a machine with much to do; each is printed (`-s`).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence

import pytest

from tests.support.launching import Launched, Launcher, wait_until
from tests.support.netns import Hosts
from tests.support.nodes import TRAINS_UNTIL_TOLD, coordinator_of, meeting_place, wait_for_all

pytestmark = pytest.mark.waits

NOTICED_S = 16.0
"""So long a silent host isn't missed."""
CUT_OFF_S = 30.0
"""So long a node without a coordinator trains."""
LATE_S = 10.0


class Job:
    """Launchers that meet on this machine, or on those hosts: the first one has the coordinator."""

    def __init__(self, launcher: Launcher, *options: str, hosts: Hosts | None = None) -> None:
        self.nodes: list[Launched] = []
        self._launcher = launcher
        self._hosts = hosts
        on_hosts = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job"]
        self._options = [*(meeting_place() if hosts is None else on_hosts), "--max-restarts=3", *options]

    def start(self, count: int = 1, *, on: int | None = None) -> None:
        """So many more; ``on``: of that host, which has had one before."""
        for _ in range(count):
            number = len(self.nodes)
            host = None if self._hosts is None else self._hosts.inhabitant(on or number + 1)
            options = [*self._options, f"--node-rank={number}"]
            where = [str(self._launcher.directory)]
            self.nodes.append(self._launcher.start(TRAINS_UNTIL_TOLD, *options, script_args=where, host=host))

    def start_with_spare(self) -> None:
        """Three that train, and one that stands by."""
        self.start(3)
        for rank, node in enumerate(self.nodes):
            trains(node, 0, rank=rank, world=3)
        self.start()
        self.nodes[3].wait_for("on standby for the next restart: 3 nodes run without this one")


def trains(node: Launched, cycle: int, *, rank: int, world: int, timeout_s: float = 60.0) -> float:
    """Wait for the rank of a node in a cycle; when it began (time.monotonic)."""
    pattern = rf"^cycle {cycle} of {rank} in {world} at (.+)$"
    return float(node.wait_for(pattern, timeout_s=timeout_s)[0])


def ended_at(node: Launched, cycle: int) -> float:
    """When that node's ranks were gone (time.monotonic)."""
    wait_until(lambda: any(event["cycle"] == cycle for event in node.events("cycle_ended")), 60)
    return float(next(event["t"] for event in node.events("cycle_ended") if event["cycle"] == cycle)) / 1e9


def finish(launcher: Launcher, nodes: Sequence[Launched]) -> None:
    """The ranks end with 0, and so does each of these launchers."""
    (launcher.directory / "finish").touch()
    assert [finished.code for finished in wait_for_all(nodes)] == [0] * len(nodes)


def test_coordinator_is_killed_and_no_cycle_ends(launcher: Launcher) -> None:
    job = Job(launcher, "--nnodes=2")
    job.start(2)
    for rank, node in enumerate(job.nodes):
        trains(node, 0, rank=rank, world=2)
    # on one machine whichever of them is first at the endpoint has it
    ((host, pid),) = [(node, pid) for node in job.nodes if (pid := coordinator_of(node)) is not None]
    os.kill(pid, signal.SIGKILL)
    host.wait_for(r"the coordinator at 127\.0\.0\.1:\d+ exited .*SIGKILL.*; another one takes over")
    wait_until(lambda: coordinator_of(host) not in (None, pid), 20)
    # the new one is told all that the old one knew, whether that is before the failure or with it
    (launcher.directory / "fail-0-1").touch()
    for rank, node in enumerate(job.nodes):
        trains(node, 1, rank=rank, world=2)
    assert "cycle 0 ended: rank 1 exited with code 7; restarting as cycle 1, 2 of 3 restarts left" in job.nodes[1].err
    assert [len(re.findall("cycle . ended", node.err)) for node in job.nodes] == [1, 1]
    finish(launcher, job.nodes)


def test_host_of_the_coordinator_is_lost_and_the_job_goes_on_once_a_launcher_is_there_again(
    launcher: Launcher, four_hosts: Hosts
) -> None:
    job = Job(launcher, "--nnodes=3", hosts=four_hosts)
    job.start_with_spare()
    first, *others, spare = job.nodes
    four_hosts.power_off(1, first)
    four_hosts.heal(1)
    job.start(on=1)
    again = job.nodes[4]
    for node in [*others, spare]:
        node.wait_for("^cycle 1 of . in 3")
    again.wait_for("on standby for the next restart")
    assert re.search(r"cycle 0 ended: node 0.*: no message from its launcher for 15\.\d s", spare.err + others[0].err)
    finish(launcher, [*others, spare, again])


def test_host_that_is_cut_off_ends_its_ranks_and_stands_by_when_it_is_back(launcher: Launcher, hosts: Hosts) -> None:
    job = Job(launcher, "--nnodes=2:3", hosts=hosts)
    job.start(3)
    for rank, node in enumerate(job.nodes):
        trains(node, 0, rank=rank, world=3)
    *others, third = job.nodes
    cut_s = time.monotonic()
    hosts.cut(3)
    began_s = max(trains(node, 1, rank=rank, world=2) for rank, node in enumerate(others))
    third.wait_for("no coordinator reachable for 3. s .*: terminating the ranks of this node")
    overlap_s = ended_at(third, 0) - began_s
    print(f"cut off to ranks ended: {ended_at(third, 0) - cut_s:.1f} s, after {overlap_s:.1f} s beside the next cycle")
    assert overlap_s < CUT_OFF_S + LATE_S
    assert ended_at(third, 0) - cut_s < NOTICED_S + CUT_OFF_S + LATE_S
    hosts.heal(3)
    third.wait_for("on standby for the next restart: 2 nodes run without this one")
    (launcher.directory / "fail-1-0").touch()
    for rank, node in enumerate(job.nodes):
        trains(node, 2, rank=rank, world=3)
    finish(launcher, job.nodes)
