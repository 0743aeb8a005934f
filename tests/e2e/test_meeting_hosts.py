"""Three hosts with a network between them, the default policy: a failure is known at once, a dead host soon."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.launching import Launched, Launcher
from tests.support.netns import Hosts
from tests.support.nodes import wait_for_all

pytestmark = pytest.mark.waits

SCRIPT = """
import pathlib, socket
WHERE = pathlib.Path(sys.argv[1])
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"], "on", socket.gethostname())
if RANK == 0:
    server = socket.create_server(("", 29777))
    peers = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
else:
    peers = []
    while not peers:
        try:
            peers.append(socket.create_connection((os.environ["MASTER_ADDR"], 29777)))
        except OSError:
            time.sleep(0.02)
for peer in peers:
    peer.setblocking(False)
say("ready", CYCLE)
while not (WHERE / "finish").exists():
    for peer in peers:
        try:
            if not peer.recv(1):
                sys.exit("connection closed by peer")
        except BlockingIOError:
            pass
    time.sleep(0.01)
"""
"""Ranks that lose a peer as those of a collective do, if its kernel says so."""


def rank_of(node: Launched, cycle: int) -> int:
    return int(node.wait_for(rf"^cycle {cycle} of (\d)")[0])


def seconds_from(nodes: list[Launched], first: str, last: str, cycle: int) -> float:
    """From the first record ``first`` of a cycle to the last one ``last`` of the next; one clock serves all hosts."""
    begin = min(event["t"] for node in nodes for event in node.events(first) if event["cycle"] == cycle)
    end = max(event["t"] for node in nodes for event in node.events(last) if event["cycle"] == cycle + 1)
    return float(end - begin) / 1e9


def test_host_whose_processes_are_killed_is_soon_done_without_and_one_that_vanishes_is_missed(
    launcher: Launcher, hosts: Hosts
) -> None:
    place = ["--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job"]
    options = [*place, "--max-restarts=2", "--ft-node-lost-timeout=5"]
    where = [str(launcher.directory)]
    nodes = [launcher.start(SCRIPT, *options, script_args=where, host=hosts.inhabitant(each)) for each in (1, 2, 3)]
    for node in nodes:
        node.wait_for("^ready 0")
    lost, vanishes = sorted(nodes[1:], key=lambda node: rank_of(node, 0) == 0)
    first, host = nodes[0], f"node{nodes.index(lost) + 1}"
    # the processes are gone in one moment, launcher and monitors included
    lost.destroy()
    Path(lost.temp_dir).mkdir()  # where the fixture looks for what is left
    for node in (first, vanishes):
        node.wait_for("^ready 1")
        # a rank that has lost its peer may be heard of first: then the loss has a line of its own
        assert re.search(rf"node \d \({host}\)(?: is lost)?: its launcher exited", node.err)
    # torch: 15 s and 30 s; wanted is less than 2
    assert seconds_from([first, vanishes], "rank_exited", "cycle_started", 0) < 5
    # no rank notices this: the kernel says after 5 s that no packet is answered, the coordinator would after 5.5 s
    number = nodes.index(vanishes) + 1
    hosts.power_off(number, vanishes)
    first.wait_for(rf"cycle 1 ended: node \d \(node{number}\): no message from its launcher for [56]\.\d s; restarting")
    first.wait_for(rf"waiting for 1 more node \(1 of 2 is here: node1; lost in cycle 1: node{number}\)")
    # without it the round isn't complete; the user ends it
    first.signal(signal.SIGTERM)
    (ended,) = wait_for_all([first])
    assert ended.code == 1


def test_endpoint_of_no_launcher_is_a_mistake_after_the_join_timeout(launcher: Launcher, hosts: Hosts) -> None:
    """A host without a launcher, and an address that no host has."""
    place = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=join_timeout=3"]
    endpoints = ("node3:29500", "198.18.77.200:29500")
    ended = wait_for_all(
        [
            launcher.start(SCRIPT, *place, f"--rdzv-endpoint={endpoint}", host=hosts.inhabitant(number))
            for number, endpoint in enumerate(endpoints, 1)
        ]
    )
    assert [finished.code for finished in ended] == [2, 2]
    for endpoint, finished in zip(endpoints, ended, strict=True):
        (line,) = [line for line in finished.err.splitlines() if "no coordinator was reached at" in line]
        assert f"at {endpoint} for 3 s" in line
        assert "set --rdzv-conf is_host=1 on one node" in line


def test_endpoint_whose_launcher_starts_last_is_waited_for(launcher: Launcher, hosts: Hosts) -> None:
    place = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node3:29500", "--rdzv-conf=join_timeout=30"]
    early = launcher.start(SCRIPT, *place, script_args=[str(launcher.directory)], host=hosts.inhabitant(1))
    early.wait_for("no coordinator reached")
    late = launcher.start(SCRIPT, *place, script_args=[str(launcher.directory)], host=hosts.inhabitant(3))
    for node in (early, late):
        node.wait_for("^ready 0")
    (launcher.directory / "finish").touch()
    assert [finished.code for finished in wait_for_all([early, late])] == [0, 0]
