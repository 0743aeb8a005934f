"""The lock of a job in etcd, as one launcher sees it: who leads, and this launcher's try to lead where nobody does."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from typing import Any

from megatron_ft.core.errors import ConfigError
from megatron_ft.ipc.net.tcp import format_address
from megatron_ft.job.rules.etcd_keys import Call, EtcdAway, Seen, look, release, take
from megatron_ft.job.rules.messages import EtcdSettings, JobDefinition, LeaseHeld
from megatron_ft.launcher.coordination.coordination import Coordination
from megatron_ft.launcher.coordination.endpoint import take_again
from megatron_ft.launcher.coordination.endpoint_lock import EndpointLock
from megatron_ft.link.reactor import Reactor, Timer

_LOOKS_S = (0.3, 0.9)
"""Seconds between two looks of a launcher that no leader leads, at least and at most."""
_LED_S = 3.0
"""Seconds for which a launcher that a leader leads doesn't look."""
_NODES_AT_ONCE = 1000
"""Launchers in a job of more nodes look less often, so that etcd isn't asked more often."""


class EtcdLock:
    """One launcher's.

    Args:
        host: address of this machine for others.
        coordination: is told who leads.
        leader: what an `EndpointLock` needs beside the lock, to be the leader's launcher.
    """

    def __init__(
        self,
        reactor: Reactor,
        settings: EtcdSettings,
        call: Call,
        defined: JobDefinition,
        coordination: Coordination,
        *,
        host: str,
        **leader: Any,
    ) -> None:
        self._reactor, self._settings, self._call = reactor, settings, call
        self._defined, self._coordination, self._host, self._leader = defined, coordination, host, leader
        self._slower = max(1.0, defined.rules.max_nodes / _NODES_AT_ONCE)
        self._looked_s = 0.0
        self._chance = random.Random()
        self._listener: socket.socket | None = None
        """For a leader that may begin here."""
        self._held: LeaseHeld | None = None
        self._leading: EndpointLock | None = None
        self._timer: Timer | None = None
        self._is_closed = False

    def start(self) -> None:
        """Look for the leader, at any time within a second, or more in a large job: one launcher is the first."""
        self._timer = self._reactor.call_later(self._chance.uniform(0.0, self._slower), self._look)

    def pids(self) -> set[int]:
        return set() if self._leading is None else self._leading.pids()

    def lost(self) -> None:
        """The leader's process has ended, and needs no other one: give up the lock."""
        if self._is_closed:
            return
        held, self._held = self._held, None
        if self._leading is not None:
            self._leading.close(is_in_a_hurry=lambda: True)
            self._leading = None
        if held is not None:
            with contextlib.suppress(RuntimeError):  # without a thread it expires
                self._reactor.call_in_thread(lambda: release(self._call, held.lease), lambda _result: None)

    def close(self, *, is_in_a_hurry: Callable[[], bool]) -> None:
        """End the leader's process, and let another launcher lead at once."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._leading is not None:
            self._leading.close(is_in_a_hurry=is_in_a_hurry)
        if self._listener is not None:
            self._listener.close()
        if self._held is not None:
            with contextlib.suppress(EtcdAway, ConfigError):  # it expires
                release(self._call, self._held.lease)

    def _look(self) -> None:
        if self._coordination.is_led and time.monotonic() < self._looked_s + _LED_S * self._slower:
            self._look_again()
            return
        self._looked_s, address = time.monotonic(), ""
        if self._held is None and self._coordination.may_lead:
            self._listener = self._listener or take_again(self._host, 0)
            if self._listener is not None:
                address = format_address(self._host, self._listener.getsockname()[1])

        def ask() -> tuple[Seen, LeaseHeld | None]:
            seen = look(self._call, self._defined.job)
            held = take(self._call, self._defined.job, address) if address and not seen.epoch else None
            return (seen, None) if held is None else (Seen(address, held.epoch, seen.revision), held)

        try:
            self._reactor.call_in_thread(ask, self._looked)
        except RuntimeError as error:  # no thread can be started
            self._coordination.no_leader_known(str(error))
            self._look_again()

    def _looked(self, result: Callable[[], tuple[Seen, LeaseHeld | None]]) -> None:
        if self._is_closed:
            return
        try:
            seen, held = result()
        except (EtcdAway, ConfigError) as error:
            self._coordination.no_leader_known(str(error))
        else:
            if self._held is not None and self._held.epoch != seen.epoch:
                self.lost()  # the leader here was paused, or cut off from etcd
            if self._listener is not None:
                self._lead_or_close(held, seen.address, self._listener)
            self._coordination.leader_at(*seen)
        self._look_again()

    def _lead_or_close(self, held: LeaseHeld | None, address: str, listener: socket.socket) -> None:
        """Start the leader, if this launcher has got the lock."""
        self._held, self._listener = held, None
        if held is None:
            listener.close()
            return
        self._leading = EndpointLock(
            self._reactor,
            address,
            self._defined,
            listener=listener,
            take=lambda: None,
            held=lambda: None,
            etcd=(self._settings, held),
            ended=self.lost,
            **self._leader,
        )
        self._leading.start()

    def _look_again(self) -> None:
        self._timer = self._reactor.call_later(self._chance.uniform(*_LOOKS_S) * self._slower, self._look)
