"""How a launcher's messages reach the coordinator: on a socket (`sockets`), or in this very process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol

from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.job import actions
from megatron_ft.core.job.messages import FromMember, JobDefinition, ToMember
from megatron_ft.link.reactor import Reactor, Timer


class Listener(Protocol):
    """Is called with what happens to the connection: from the launcher's loop, never from inside `Transport`."""

    def opened(self) -> None:
        """Connected, and the coordinator has proved the secret, if there is one."""

    def failed(self, problem: str, *, is_unowned: bool = True) -> None:
        """The connection can't be made; ``problem``: why, in words.

        ``is_unowned``: no process is there, as far as known; False also for a host whose name isn't known.
        """

    def broken(self) -> None:
        """Disconnected."""

    def refused(self, text: str) -> None:
        """There won't be one with that coordinator: the secret is wrong, or the version. Why, for the user."""

    def heard(self, message: ToMember) -> None:
        """The coordinator says something."""


class Transport(Protocol):
    """One connection at a time."""

    def connect(self, address: str) -> None:
        """Connect to ``host:port`` and give up the connection before; ``opened``, ``failed`` or ``refused`` follows."""

    def disconnect(self) -> None:
        """Give up the connection, which may be resumed: the other end sees a reset. No call of the listener follows."""

    def transmit(self, message: FromMember) -> None:
        """Send a message, if the connection is open."""

    def close(self, within_s: float = 0.5) -> None:
        """Give it up for good; what is unsent has so many seconds to go."""


class InProcess:
    """Coordinator of a job of one node, inside its launcher."""

    def __init__(self, reactor: Reactor, listener: Listener, defined: JobDefinition) -> None:
        self._reactor = reactor
        self._listener = listener
        name = f"{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}"
        self._machine: Coordinator | None = Coordinator(name, defined, now_s=time.monotonic())
        """The coordinator's machine; None once it has nothing to do any more."""
        self._links = 0
        self._link: int | None = None
        self._is_settling = False
        self._alarm: Timer | None = None

    def connect(self, address: str) -> None:
        self.disconnect()
        self._links += 1
        link = self._link = self._links
        self._later(link, self._listener.opened if self._machine is not None else self._fail)

    def disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._reactor.call_later(0.0, lambda: self._tell(actions.Broken(link, reset=True)))

    def transmit(self, message: FromMember) -> None:
        link = self._link
        if link is not None:
            self._reactor.call_later(0.0, lambda: self._tell(actions.Heard(link, message)))

    def close(self, within_s: float = 0.5) -> None:
        self._link = self._machine = None
        if self._alarm is not None:
            self._alarm.cancel()

    def _later(self, link: int, callback: Callable[[], None]) -> None:
        """Call the listener, unless the connection is given up before."""
        self._reactor.call_later(0.0, lambda: callback() if self._link == link else None)

    def _fail(self) -> None:
        self._link = None
        self._listener.failed("the coordinator has ended")

    def _break(self) -> None:
        self._link = None
        self._listener.broken()

    def _tell(self, event: actions.CoordinatorEvent) -> None:
        if self._machine is not None:
            self._do(self._machine.handle(event, time.monotonic()))

    def _settle(self) -> None:
        self._is_settling = False
        if self._machine is not None:
            self._do(self._machine.settle(time.monotonic()))

    def _do(self, effects: list[actions.CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case actions.Send(links, message):
                    for link in links:
                        self._hear(link, message)
                case actions.Drop(link):
                    self._later(link, self._break)
                case actions.Quit():
                    self._machine = None
                    if self._link is not None:
                        self._later(self._link, self._break)
        self._set_alarm()

    def _hear(self, link: int, message: ToMember) -> None:
        self._later(link, lambda: self._listener.heard(message))

    def _set_alarm(self) -> None:
        machine = self._machine
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if machine is None or self._is_settling:
            return
        if machine.needs_settling:
            self._is_settling = True
            self._reactor.call_later(0.0, self._settle)
        else:
            self._alarm = self._reactor.call_later(max(0.0, machine.alarm_s - time.monotonic()), self._settle)
