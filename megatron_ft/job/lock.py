"""The lock of a job in etcd, as one launcher sees it: its holder has the leader."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
from collections.abc import Callable

from megatron_ft.errors import ConfigError
from megatron_ft.job.coordination import Coordination
from megatron_ft.job.endpoint import listen_at
from megatron_ft.job.leader_process import LeaderProcess
from megatron_ft.job.rules.etcd_keys import Call, EtcdAway, Seen, look, release, take
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.tcp import format_address

_LOOKS_S = (0.3, 0.9)
"""Seconds between two looks into etcd of a launcher that no leader leads, at least and at most."""
_LED_LOOKS_S = (2.0, 3.0)
"""Seconds between two looks of a launcher that a leader leads."""
_NODES_AT_ONCE = 1000
"""Launchers in a job of more nodes look less often, so that etcd isn't asked more often."""
_MOST_SLOWER = 7.0
"""Not so seldom, however, that a new leader gives up those that haven't found it yet."""


class EtcdLock:
    """The leader's key in etcd, which any launcher takes where nobody leads: it looks there until ``close``.

    Args:
        host: address of this machine for others.
        launcher: may lead, and is told who does.
    """

    def __init__(self, reactor: Reactor, leader: LeaderProcess, call: Call, launcher: Coordination, host: str) -> None:
        self._reactor, self._leader, self._launcher = reactor, leader, launcher
        job = launcher.member.identity
        self._call, self._job, self._host = call, job.job, host
        self._slower = min(_MOST_SLOWER, max(1.0, job.rules.max_nodes / _NODES_AT_ONCE))
        self._is_closed, self._chance = False, random.Random()
        self._look_in(0.0, 1.0)  # one launcher is the first

    def close(self, *, is_in_a_hurry: Callable[[], bool]) -> None:
        """End the leader's process once all launchers know the job's end, and let another launcher have the lock."""
        self._is_closed = True
        self._timer.cancel()
        held = self._leader.lock
        self._leader.close(is_in_a_hurry=is_in_a_hurry)
        if held is not None:
            with contextlib.suppress(EtcdAway, ConfigError):  # it expires
                release(self._call, held.lease)

    def _look_in(self, least_s: float, most_s: float) -> None:
        self._timer = self._reactor.call_later(self._chance.uniform(least_s, most_s) * self._slower, self._look)

    def _look(self) -> None:
        held = self._leader.lock
        may_lead = held is None and self._launcher.may_lead
        gives_up = "" if held is None or not self._leader.has_quit else held.lease
        try:
            self._reactor.call_in_thread(functools.partial(self._ask, gives_up, may_lead), self._looked)
        except RuntimeError as error:  # no thread can be started
            self._launcher.member.problem = str(error)
            self._look_in(*_LOOKS_S)

    def _ask(self, gives_up: str, may_lead: bool) -> tuple[Seen, socket.socket | None]:
        """Return who leads, with the socket for the leader if this launcher has taken the lock."""
        if gives_up:
            release(self._call, gives_up)
        seen = look(self._call, self._job)
        if seen.epoch or not may_lead:
            return seen, None
        with contextlib.ExitStack() as unless_taken:
            listener = unless_taken.enter_context(listen_at(self._host, 0))
            address = format_address(self._host, listener.getsockname()[1])
            if (taken := take(self._call, self._job, address)) is None:
                return seen, None
            unless_taken.pop_all()
            return taken, listener

    def _looked(self, result: Callable[[], tuple[Seen, socket.socket | None]]) -> None:
        if self._is_closed:
            return
        member = self._launcher.member
        try:
            seen, listener = result()
        except (EtcdAway, ConfigError, OSError) as error:
            member.problem = str(error)
        else:
            if self._leader.lock is not None and self._leader.lock.epoch != seen.epoch:
                self._leader.close()  # the lock was given up, or the leader was paused, or cut off from etcd
            if listener is not None:
                self._leader.begin(seen, listener)
            self._launcher.leader_at(seen.address, seen.epoch, seen.revision)
        self._look_in(*(_LED_LOOKS_S if member.is_led else _LOOKS_S))
