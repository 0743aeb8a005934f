"""The leader's machine on sockets: one thread, one event loop, one connection for each launcher."""

from __future__ import annotations

import errno
import functools
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ft.errors import ProtocolError
from megatron_ft.job.connection import Connection
from megatron_ft.job.etcd_leader import AGAIN_S, Decisions
from megatron_ft.job.parts import HEARD_BY_PARTS
from megatron_ft.job.rules.actions import CoordinatorEffect, Drop, Quit, Send
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.job.rules.etcd_keys import Ledger
from megatron_ft.job.rules.messages import ANSWER, TO_LEADER, FromMember, Hello
from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.base.rate_limiter import RateLimiter
from megatron_ft.link.log import COORDINATOR
from megatron_ft.link.reactor import Reactor, Timer
from megatron_ft.link.tcp import format_address
from megatron_ft.link.wire import LENGTH_BYTES, decode, encode

_FROM_MEMBER: Vocabulary[FromMember] = Vocabulary(TO_LEADER | HEARD_BY_PARTS)
GREETING_S = 10.0
"""Seconds that a new connection has to say hello."""
_ACCEPTED_AT_ONCE = 1000
MOST_STRANGERS = 256
"""Connections of one address that haven't said hello; a further one is closed at once. A launcher tries again."""
FULL_PAUSE_S = 1.0
_SILENCE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
"""Errors of a host that answers no packet; the last two if the network has reported it as unreachable meanwhile."""
_SETTLE_SHARE = 0.15
_LONGEST_PAUSE_S = 0.08
"""Share of the time to spend on conclusions, which take longer with more nodes, unless a pause gets longer than this:
messages are heard in between."""
_BEAT = encode(ANSWER)[LENGTH_BYTES:]


@dataclass(slots=True)
class Link:
    """One launcher's connection.

    Args:
        address: its host and port; None if the launcher is in this process.
        greeting: ends the connection if no hello comes; None once one has.
    """

    connection: Connection[FromMember]
    address: tuple[str, int] | None
    greeting: Timer | None


class Service:
    """The leader, in a process of its own or, for a job of one node, in its launcher's.

    Args:
        listener: where launchers connect; None: only this process does, by ``dial``.
        keep: gives the record of a decision to the launcher that holds the lock, and returns once it has it.
        say: gets a line for the user.
        ledger: the lock is in etcd, and decisions are kept there.
    """

    def __init__(
        self,
        reactor: Reactor,
        machine: Coordinator,
        *,
        listener: socket.socket | None = None,
        secret: bytes | None = None,
        keep: Callable[[DecisionRecord], None] = lambda _record: None,
        say: Callable[[str], None] = lambda _text: None,
        ledger: Ledger | None = None,
    ) -> None:
        self.is_over = False
        """No launcher needs this leader any more, or it has lost the lock."""
        self.links: dict[int, Link] = {}
        self._reactor, self._machine, self._listener, self._secret = reactor, machine, listener, secret
        self._keep, self._say = keep, say
        self._decisions = Decisions(ledger, machine.rules, self.links)
        self._strangers: Counter[str] = Counter()
        """Number of connections without a hello by address."""
        self._next = 1
        self._settle_s = 0.0
        """Time before which the job isn't settled."""
        self._unsent: list[Connection[FromMember]] = []
        """Connections to flush at the end of a turn: what all hear at once makes them answer at once."""
        self._turn_timer: Timer | None = None
        self._limiter = RateLimiter()
        self._watch_listener()
        self._turn_by(0.0)

    def dial(self, _host: str, _port: int) -> socket.socket:
        """Return a connection to this leader, for a launcher in its process; called in any thread."""
        ours, theirs = socket.socketpair()
        self._reactor.post(lambda: theirs.close() if self.is_over else self._adopt(theirs, None))
        return ours

    def close(self) -> None:
        """Close all connections."""
        self.is_over = True
        for link in self.links.values():
            link.connection.close()
        self.links.clear()
        if self._listener is not None:
            self._reactor.unwatch(self._listener.fileno())
            self._listener.close()

    # -- connections ------------------------------------------------------------------------------------------

    def _watch_listener(self) -> None:
        if self._listener is not None and not self.is_over:
            self._reactor.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:  # no descriptor is free; the listener stays readable, and would busy-loop
                self._reactor.unwatch(self._listener.fileno())
                self._reactor.call_later(FULL_PAUSE_S, self._watch_listener)
                self._say_seldom(
                    f"no more launchers can be let in beside {len(self.links)} connections ({error.strerror}): "
                    f"trying again every {FULL_PAUSE_S:g} s; raise the limit of open files (ulimit -Hn)"
                )
                return
            if self._strangers[address[0]] >= MOST_STRANGERS:
                sock.close()
            else:
                self._strangers[address[0]] += 1
                self._adopt(sock, address[:2])

    def _adopt(self, sock: socket.socket, address: tuple[str, int] | None) -> None:
        number, self._next = self._next, self._next + 1
        ended = functools.partial(self._ended, number)
        connection = Connection(
            *(self._reactor, sock),
            secret=self._secret,
            connects=False,
            parse=_parse,
            heard=functools.partial(self._heard, number),
            ended=ended,
        )
        self.links[number] = Link(connection, address, self._reactor.call_later(GREETING_S, ended))

    def _heard(self, number: int, message: FromMember) -> None:
        link = self.links[number]
        if isinstance(message, Hello) is not (link.greeting is not None):
            raise ProtocolError("a hello in another place than the first")
        if link.greeting is not None:
            self._greeted(link)
        COORDINATOR.debug("from launcher", number, message)
        now_s = time.monotonic()
        if effects := self._machine.heard(number, message, now_s):
            self._do(effects)
        self._turn_by(now_s)

    def _greeted(self, link: Link) -> None:
        """The launcher is no stranger any more."""
        assert link.greeting is not None
        link.greeting.cancel()
        link.greeting = None
        if link.address is not None:
            self._strangers[link.address[0]] -= 1

    def _ended(self, number: int, problem: OSError | ProtocolError | None = None) -> None:
        """Forget a connection that has ended, or says nothing."""
        if (link := self.links.pop(number, None)) is None:
            return
        if link.address is not None and link.connection.channel is not None and isinstance(problem, ProtocolError):
            self._say_seldom(f"closed the connection from {format_address(*link.address)}: {problem}")
        link.connection.close()
        if link.greeting is not None:
            self._greeted(link)
            return
        now_s, code = time.monotonic(), problem.errno if isinstance(problem, OSError) else None
        is_silent = code in _SILENCE
        # one within this process ends although its launcher goes on; a pipe is broken by a launcher that has ended
        is_reset = link.address is None or (problem is not None and not is_silent and code != errno.EPIPE)
        self._do(self._machine.broken(number, now_s, silent=is_silent, reset=is_reset))
        self._turn_by(now_s)

    def _say_seldom(self, text: str) -> None:
        if line := self._limiter.admit(text, time.monotonic()):
            self._say(line)

    # -- the machine ------------------------------------------------------------------------------------------

    def _turn_by(self, at_s: float) -> None:
        """Draw conclusions then at the latest, and once all that has come until then is handled."""
        timer = self._turn_timer
        if timer is None or at_s < timer.at_s:
            if timer is not None:
                timer.cancel()
            self._turn_timer = self._reactor.call_later(at_s - time.monotonic(), self._turn)

    def _turn(self) -> None:
        self._turn_timer = None
        if self.is_over:
            return
        machine, now_s = self._machine, time.monotonic()
        if now_s >= self._decisions.due_s:
            try:
                self._reactor.call_in_thread(self._decisions.request(), self._answered)
            except RuntimeError:  # no thread can be started
                self._decisions.due_s = now_s + AGAIN_S
        if now_s >= self._settle_s and (machine.needs_settling or now_s >= machine.alarm_s):
            effects = machine.settle(now_s)
            took_s = time.monotonic() - now_s
            self._settle_s = now_s + took_s + min(took_s * (1 / _SETTLE_SHARE - 1), _LONGEST_PAUSE_S)
            self._do(effects)
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            connection.flush()
        due_s = self._settle_s if machine.needs_settling else max(machine.alarm_s, self._settle_s)
        self._turn_by(min(due_s, self._decisions.due_s))

    def _do(self, effects: list[CoordinatorEffect]) -> None:
        self._carry_out(self._decisions.admit(effects, time.monotonic()))

    def _carry_out(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            COORDINATOR.debug("effect", effect)
            match effect:
                case Send(numbers, message):
                    body = _BEAT if message is ANSWER else encode(message)[LENGTH_BYTES:]
                    for number in numbers:
                        if (link := self.links.get(number)) is not None:
                            link.connection.queue(body)
                            self._unsent.append(link.connection)
                case Drop(number):
                    if (link := self.links.pop(number, None)) is not None:
                        link.connection.close()
                case DecisionRecord():
                    self._keep(effect)
                case Quit():
                    self.close()

    def _answered(self, answer: Callable[[], bool]) -> None:
        """Do what was waiting for etcd's answer."""
        if not self.is_over:
            made = self._decisions.answered(answer, time.monotonic())
            self._machine.lock_answers = not self._decisions.problem
            self._carry_out(made)
            self._turn_by(0.0)


_parse = functools.lru_cache(maxsize=64)(lambda body: _FROM_MEMBER.parse(decode(body)))
"""Simultaneous answers of thousands of launchers are equal, byte by byte."""
