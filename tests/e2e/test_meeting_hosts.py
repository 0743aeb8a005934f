"""Three hosts with a network between them, the default policy: a failure is known at once, a dead host soon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launching import Launched, Launcher
from tests.support.netns import Hosts
from tests.support.nodes import wait_for_all

pytestmark = pytest.mark.waits

# ranks that notice nothing by themselves, and ranks that lose a peer as those of a collective do
SCRIPT = """
import pathlib, socket
WHERE = pathlib.Path(sys.argv[1])
say("cycle", CYCLE, "of", RANK, "in", os.environ["WORLD_SIZE"], "on", socket.gethostname())
if "connected" in sys.argv:
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
    if (WHERE / f"kill-{CYCLE}-{RANK}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if "connected" in sys.argv:
        for peer in peers:
            try:
                if not peer.recv(1):
                    sys.exit("connection closed by peer")
            except BlockingIOError:
                pass
    time.sleep(0.01)
"""


def start_on_each(launcher: Launcher, hosts: Hosts, *options: str, connected: bool = False) -> list[Launched]:
    """In the order of the hosts; the first one's launcher starts the coordinator. All ranks run when this returns."""
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=job"]
    words = [str(launcher.directory), *(["connected"] if connected else [])]
    nodes = [
        launcher.start(SCRIPT, *place, *options, script_args=words, host=hosts.inhabitant(number))
        for number in (1, 2, 3)
    ]
    for node in nodes:
        node.wait_for("^ready 0")
    return nodes


def rank_of(node: Launched, cycle: int) -> int:
    return int(node.wait_for(rf"^cycle {cycle} of (\d)")[0])


def seconds_from(nodes: list[Launched], first: str, last: str, cycle: int) -> float:
    """From the first record ``first`` of a cycle to the last one ``last`` of the next; one clock serves all hosts."""
    begin = min(event["t"] for node in nodes for event in node.events(first) if event["cycle"] == cycle)
    end = max(event["t"] for node in nodes for event in node.events(last) if event["cycle"] == cycle + 1)
    return float(end - begin) / 1e9


def kill_all_of(node: Launched) -> None:
    """The processes are gone in one moment, launcher and monitors included."""
    node.destroy()
    Path(node.temp_dir).mkdir()  # where the fixture looks for what is left


def test_host_whose_processes_are_killed_is_soon_done_without(launcher: Launcher, hosts: Hosts) -> None:
    nodes = start_on_each(launcher, hosts, "--nnodes=2:3", "--max-restarts=1", connected=True)
    lost = next(node for node in nodes[1:] if rank_of(node, 0) != 0)
    others = [node for node in nodes if node is not lost]
    host = f"node{nodes.index(lost) + 1}"
    kill_all_of(lost)
    for node in others:
        node.wait_for("^cycle 1 of . in 2 on")
        # a rank that has lost its peer may be heard of first: then the loss has a line of its own
        assert re.search(rf"node \d \({host}\)(?: is lost)?: its launcher exited", node.err)
    # torch: 15 s and 30 s; wanted is less than 2
    assert seconds_from(others, "rank_exited", "cycle_started", 0) < 5
    (launcher.directory / "finish").touch()
    assert [finished.code for finished in wait_for_all(others)] == [0, 0]


def test_host_that_vanishes_is_missed_even_if_no_rank_notices(launcher: Launcher, hosts: Hosts) -> None:
    nodes = start_on_each(launcher, hosts, "--nnodes=3", "--max-restarts=1", "--ft-node-lost-timeout=5")
    hosts.cut(3)
    kill_all_of(nodes[2])
    others = nodes[:2]
    for node in others:
        # the kernel says after 5 s that no packet is answered, the coordinator itself would after 5.5 s
        node.wait_for(
            r"cycle 0 ended: node \d \(node3\): no message from its launcher for [56]\.\d s; restarting as cycle 1"
        )
        node.wait_for(r"waiting for 1 more node \(2 of 3 are here: node1, node2; lost in cycle 0: node3\)")
    # without it the round isn't complete; the user ends it
    for node in others:
        node.process.terminate()
    assert [finished.code for finished in wait_for_all(others)] == [1, 1]


def test_endpoint_of_no_launcher_is_a_mistake_after_the_join_timeout(launcher: Launcher, hosts: Hosts) -> None:
    """A host without a launcher, and an address that no host has."""
    place = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-conf=join_timeout=6"]
    endpoints = ("node3:29500", "198.18.77.200:29500")
    ended = wait_for_all(
        [
            launcher.start(SCRIPT, *place, f"--rdzv-endpoint={endpoint}", host=hosts.inhabitant(number))
            for number, endpoint in enumerate(endpoints, 1)
        ]
    )
    assert [finished.code for finished in ended] == [2, 2]
    for endpoint, finished in zip(endpoints, ended, strict=True):
        (line,) = [line for line in finished.err.splitlines() if "no process was reached at" in line]
        assert f"at {endpoint} for 6 s" in line
        assert "set --rdzv-conf is_host=1 on one node" in line


def test_endpoint_whose_launcher_starts_last_is_waited_for(launcher: Launcher, hosts: Hosts) -> None:
    place = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node3:29500", "--rdzv-conf=join_timeout=60"]
    early = launcher.start(SCRIPT, *place, script_args=[str(launcher.directory)], host=hosts.inhabitant(1))
    early.wait_for("no coordinator reached")
    late = launcher.start(SCRIPT, *place, script_args=[str(launcher.directory)], host=hosts.inhabitant(3))
    for node in (early, late):
        node.wait_for("^ready 0")
    (launcher.directory / "finish").touch()
    assert [finished.code for finished in wait_for_all([early, late])] == [0, 0]
