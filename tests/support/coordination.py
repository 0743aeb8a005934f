"""A launcher's connection to a coordinator, as a test uses it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from megatron_ft.job.rules import messages as m
from megatron_ft.launcher.coordination.coordinator_connection import CoordinatorConnection
from megatron_ft.launcher.coordination.in_process import InProcess
from megatron_ft.link.reactor import Reactor

__all__ = ["BOUND_S", "Ear", "connect", "sockets", "until"]

BOUND_S = 20.0


class Ear:
    """Writes down what a transport says, and that it says it from the loop."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.heard_messages: list[m.ToMember] = []
        self.is_inside = False
        self.problem = ""

    def _note(self, what: Any) -> None:
        assert not self.is_inside, "called from inside a method of the transport"
        self.told.append(what)

    def opened(self) -> None:
        self._note("opened")

    def failed(self, problem: str, *, is_unowned: bool = True) -> None:
        self.problem = problem
        self._note("failed")

    def broken(self) -> None:
        self._note("broken")

    def heard(self, message: m.ToMember) -> None:
        self._note(message)
        self.heard_messages.append(message)


@contextlib.contextmanager
def sockets(reactor: Reactor, secret: bytes | None = None) -> Iterator[tuple[CoordinatorConnection, Ear]]:
    ear = Ear()
    made = CoordinatorConnection(reactor, secret, ear)
    try:
        yield made, ear
    finally:
        made.close()
        made.close()  # twice is fine


def until(reactor: Reactor, condition: Any) -> None:
    assert reactor.run_until(condition, time.monotonic() + BOUND_S)


def connect(transport: CoordinatorConnection | InProcess, ear: Ear, address: str) -> None:
    """And see that it says nothing meanwhile."""
    ear.is_inside = True
    transport.connect(address)
    ear.is_inside = False
