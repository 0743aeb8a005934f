"""What comes over the launcher's control socket: what is passed on of it, what is said, and how often."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_ft.launcher.cycle.control_socket import ControlSocket, WorkloadControl
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import encode

ASK: dict[str, Any] = {"type": "workload_control", "action": "Continue", "description": "going on", "rank": 3}


class Served:
    """A control socket, and what came of it."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self.requests: list[WorkloadControl] = []
        self.reactor = Reactor()
        self.control = ControlSocket(
            str(path),
            self.reactor,
            say=self.said.append,
            on_request=self.requests.append,
            on_order=lambda _order, _pid: False,
            on_question=mock.Mock(),
        )
        self.control.start()

    def tell(self, *messages: dict[str, Any]) -> bytes:
        """Send them on one connection; the raw answers."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self.control.path)
            sock.sendall(b"".join(encode(message) for message in messages))
            for _ in range(3):
                self.reactor.run_once(0.0)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                return sock.recv(1 << 20)
        return b""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "s")
    yield served
    served.control.close()
    served.reactor.close()


@pytest.mark.parametrize(
    "change",
    [
        {"type": "x" * 100_000},
        {"rank": 10**400},
        {"action": "\x1b" * 1000},
    ],
)
def test_malformed_request_is_reported_in_one_short_line(served: Served, change: dict[str, Any]) -> None:
    assert served.tell({**ASK, **change}) == b""
    (line,) = served.said
    assert line.isprintable()
    assert len(line) < 250
    assert not served.requests


def test_a_flood_fills_no_terminal(served: Served) -> None:
    for _ in range(100):
        served.tell({**ASK, "action": "Nothing"})
    assert len(served.said) == 8
    for _ in range(100):
        assert b'"ok"' in served.tell(ASK)
    assert len(served.requests) == 8
    served.tell({**ASK, "action": "ShutdownWorkload"})
    assert served.requests[-1].action == "ShutdownWorkload"  # that one is always passed on
