"""The coordinator of a job of one node, in the process of its launcher: it opens no port."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.messages import FromMember, JobDefinition
from megatron_ft.launcher.coordination.coordinator_connection import Listener
from megatron_ft.link.reactor import Reactor, Timer


class InProcess:
    """In place of a `CoordinatorConnection`: its methods, and calls of the listener from the loop."""

    def __init__(self, reactor: Reactor, listener: Listener, defined: JobDefinition) -> None:
        self._reactor, self._listener = reactor, listener
        name = f"{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}"
        machine = Coordinator(name, defined, now_s=time.monotonic(), parts=LEADER_PARTS)
        self._machine: Coordinator | None = machine
        """The coordinator's machine; None once it has nothing to do any more."""
        self._links = 0
        self._link: int | None = None
        """Number of the connection; None: there is none."""
        self._alarm: Timer | None = None

    def connect(self, address: str) -> None:
        self.disconnect()
        self._links += 1
        self._link = self._links
        has_ended = self._machine is None
        self._tell(lambda: self._listener.failed("the coordinator has ended") if has_ended else self._listener.opened())

    def disconnect(self) -> None:
        if self._link is not None:
            self._handle(actions.Broken(self._link, reset=True))
            self._link = None

    def transmit(self, message: FromMember) -> None:
        if self._link is not None:
            self._handle(actions.Heard(self._link, message))

    def close(self) -> None:
        self._link = self._machine = None

    def _tell(self, call: Callable[[], None]) -> None:
        """Call the listener, unless the connection is given up before."""
        link = self._link
        self._reactor.call_later(0.0, lambda: call() if self._link == link else None)

    def _break(self) -> None:
        self._link = None
        self._listener.broken()

    def _handle(self, event: actions.CoordinatorEvent) -> None:
        self._reactor.call_later(0.0, lambda: self._do(lambda machine, now_s: machine.handle(event, now_s)))

    def _do(self, turn: Callable[[Coordinator, float], list[actions.CoordinatorEffect]]) -> None:
        machine = self._machine
        if machine is None:
            return
        for effect in turn(machine, time.monotonic()):
            match effect:
                case actions.Send(links, message) if self._link in links:
                    self._tell(functools.partial(self._listener.heard, message))
                case actions.Drop(link) if link == self._link:
                    self._tell(self._break)
                case actions.Quit():
                    self._machine = None
                    self._tell(self._break)
        if self._alarm is not None:
            self._alarm.cancel()
        wait_s = 0.0 if machine.needs_settling else machine.alarm_s - time.monotonic()
        self._alarm = self._reactor.call_later(wait_s, lambda: self._do(Coordinator.settle))
