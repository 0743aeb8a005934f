"""The lock of a job, as one launcher sees it: the port of the endpoint, or a key in etcd. Its holder has the leader."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable

from megatron_ft.errors import ConfigError
from megatron_ft.job.coordination import Coordination
from megatron_ft.job.endpoint import listen_at
from megatron_ft.job.leader_process import LeaderProcess
from megatron_ft.job.rules.etcd_keys import Call, EtcdAway, Seen, look, release, take
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.messages import EtcdSettings, JobDefinition, LeaseHeld
from megatron_ft.link.reactor import Reactor, Timer
from megatron_ft.link.tcp import format_address, parse_address

_TAKE_AGAIN_S = 0.5
"""Seconds between two tries to take the endpoint's port, while another process has it."""
_LOOKS_S = (0.3, 0.9)
"""Seconds between two looks into etcd of a launcher that no leader leads, at least and at most."""
_LED_S = 3.0
"""Seconds for which a launcher that a leader leads doesn't look."""
_NODES_AT_ONCE = 1000
"""Launchers in a job of more nodes look less often, so that etcd isn't asked more often."""


class Lock:
    """Base of both locks: a time to try again, and the leader's process of the holder.

    ``start`` takes the lock as soon as no other launcher holds it.
    """

    def __init__(self, reactor: Reactor, leader: LeaderProcess) -> None:
        self._reactor, self._leader = reactor, leader
        self._timer: Timer | None = None

    def close(self, *, is_in_a_hurry: Callable[[], bool]) -> None:
        """End the leader's process once all launchers know the job's end, and let another launcher have the lock."""
        if self._timer is not None:
            self._timer.cancel()
        self._leader.close(is_in_a_hurry=is_in_a_hurry)


class EndpointLock(Lock):
    """The endpoint's port, which one launcher of that host holds until the job's end. The others try to take it.

    Args:
        member: of this launcher; it is told once the lock is held.
        address: of the endpoint.
        listener: the port, if this launcher has got it already.
    """

    def __init__(
        self, reactor: Reactor, leader: LeaderProcess, member: Member, address: str, listener: socket.socket | None
    ) -> None:
        super().__init__(reactor, leader)
        self._member, self._address, self._listener = member, address, listener

    def start(self) -> None:
        try:
            listener = self._listener or listen_at(*parse_address(self._address))
        except OSError:
            self._timer = self._reactor.call_later(_TAKE_AGAIN_S, self.start)
        else:
            self._member.owns = True
            self._leader.begin(self._address, listener)


class EtcdLock(Lock):
    """The leader's key in etcd, which any launcher takes where nobody leads.

    Args:
        host: address of this machine for others.
        coordination: is told who leads.
    """

    def __init__(
        self,
        reactor: Reactor,
        leader: LeaderProcess,
        settings: EtcdSettings,
        call: Call,
        defined: JobDefinition,
        coordination: Coordination,
        *,
        host: str,
    ) -> None:
        super().__init__(reactor, leader)
        self._settings, self._call, self._job, self._host = settings, call, defined.job, host
        self._coordination = coordination
        self._slower = max(1.0, defined.rules.max_nodes / _NODES_AT_ONCE)
        self._looked_s, self._chance = 0.0, random.Random()
        self._held: LeaseHeld | None = None
        self._is_closed = False

    def start(self) -> None:
        self._look_in(0.0, 1.0)  # one launcher is the first

    def close(self, *, is_in_a_hurry: Callable[[], bool]) -> None:
        self._is_closed = True
        super().close(is_in_a_hurry=is_in_a_hurry)
        if self._held is not None:
            with contextlib.suppress(EtcdAway, ConfigError):  # it expires
                release(self._call, self._held.lease)

    def _look_in(self, least_s: float, most_s: float) -> None:
        self._timer = self._reactor.call_later(self._chance.uniform(least_s, most_s) * self._slower, self._look)

    def _look(self) -> None:
        if self._coordination.member.is_led and time.monotonic() < self._looked_s + _LED_S * self._slower:
            self._look_in(*_LOOKS_S)
            return
        self._looked_s = time.monotonic()
        may_lead = self._held is None and self._coordination.may_lead
        try:
            self._reactor.call_in_thread(lambda: self._ask(may_lead=may_lead), self._looked)
        except RuntimeError as error:  # no thread can be started
            self._coordination.member.problem = str(error)
            self._look_in(*_LOOKS_S)

    def _ask(self, *, may_lead: bool) -> tuple[Seen, tuple[socket.socket, LeaseHeld] | None]:
        """Return who leads; with the socket and the lease for the leader if this launcher has taken the lock."""
        seen = look(self._call, self._job)
        if seen.epoch or not may_lead:
            return seen, None
        with contextlib.ExitStack() as unless_taken:
            try:
                listener = unless_taken.enter_context(listen_at(self._host, 0))
            except OSError:
                return seen, None
            address = format_address(self._host, listener.getsockname()[1])
            if (held := take(self._call, self._job, address)) is None:
                return seen, None
            unless_taken.pop_all()
            return Seen(address, held.epoch, seen.revision), (listener, held)

    def _looked(self, result: Callable[[], tuple[Seen, tuple[socket.socket, LeaseHeld] | None]]) -> None:
        if self._is_closed:
            return
        try:
            seen, taken = result()
        except (EtcdAway, ConfigError) as error:
            self._coordination.member.problem = str(error)
        else:
            if self._held is not None and self._held.epoch != seen.epoch:
                self._lost()  # the leader here was paused, or cut off from etcd
            if taken is not None:
                listener, self._held = taken
                self._leader.begin(seen.address, listener, (self._settings, self._held), self._lost)
            self._coordination.leader_at(*seen)
        self._look_in(*_LOOKS_S)

    def _lost(self) -> None:
        """The leader's process has ended, and needs no other one, or another launcher leads: give up the lock."""
        if self._is_closed:
            return
        held, self._held = self._held, None
        self._leader.close()
        if held is not None:
            with contextlib.suppress(RuntimeError):  # without a thread it expires
                self._reactor.call_in_thread(lambda: release(self._call, held.lease), lambda _result: None)
