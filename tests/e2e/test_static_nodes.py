"""Several launchers of one job that are told ``--node-rank`` and ``--master-addr``."""

from __future__ import annotations

import socket

import pytest

from tests.e2e.test_launcher_nodes import SCRIPT, cycles_of, started
from tests.support.launching import Launched, Launcher, launcher
from tests.support.nodes import wait_for_all

__all__ = ["launcher"]
IMPORTED_BEFORE = ()  # torch is enough


def meeting_place(*more: str) -> list[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    return ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", *more]


def start(launcher: Launcher, script: str, number: int, place: list[str]) -> Launched:
    return launcher.start(script, *place, f"--node-rank={number}")


@pytest.mark.parametrize("backend", [[], ["--rdzv-backend=static"]])
def test_static_nodes_restart_with_a_fresh_store_and_keep_their_node_ranks(
    launcher: Launcher, backend: list[str]
) -> None:
    place = meeting_place("--max-restarts=1", *backend)
    nodes = [start(launcher, SCRIPT, number, place) for number in (1, 0)]
    assert [finished.code for finished in wait_for_all(nodes)] == [0, 0]
    assert [cycles_of(node) for node in nodes] == [["0", "1"], ["0", "1"]]
    assert "cycle 1 of 1" in nodes[0].out
    assert "cycle 1 of 0" in nodes[1].out


def test_a_dead_node_costs_one_restart_and_is_waited_for(launcher: Launcher) -> None:
    script = """
from datetime import timedelta
from torch.distributed import TCPStore
say("cycle", CYCLE, "of", RANK)
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                 timeout=timedelta(seconds=20))
store.set(f"rank{RANK}", "here")
if CYCLE == 0:
    store.get("never")
# whose peer isn't there fails, as one does that finds the addresses of the last cycle
while not store.check([f"rank{1 - RANK}"]):
    time.sleep(0.02)
    assert time.monotonic() - started_s < 30, "the other rank isn't there"
"""
    script = "import time\nstarted_s = time.monotonic()\n" + script
    place = meeting_place("--max-restarts=2", "--rdzv-backend=static")
    nodes = [start(launcher, script, number, place) for number in range(2)]
    for node in nodes:
        node.wait_for("^cycle 0 of")
    nodes[1].process.kill()
    nodes[1].process.wait()
    # several cycles of an older launcher
    nodes[0].wait_for("waiting for 1 more node \\(1 of 2 is here: ")
    assert started(nodes[0]) == [0]
    nodes[1] = start(launcher, script, 1, place)
    ended = wait_for_all(nodes)
    assert [finished.code for finished in ended] == [0, 0]
    assert [started(node) for node in nodes] == [[0, 1], [1]]
    assert nodes[0].ends()[0][2:] == ("restart", 1)
