"""Several launchers of one job that are told ``--node-rank`` and ``--master-addr``."""

from __future__ import annotations

import socket

import pytest

from tests.e2e.test_launcher_nodes import SCRIPT, cycles_of
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
