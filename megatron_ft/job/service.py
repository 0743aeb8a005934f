"""The coordinator's machine on sockets: one thread, one epoll, as many connections as there are launchers."""

from __future__ import annotations

import errno
import functools
import gc
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

from megatron_ft.core.codec import Vocabulary
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.messages.secret_messages import HANDSHAKE, Ask, Denied, Handshake, Open
from megatron_ft.core.rate_limiter import RateLimiter
from megatron_ft.ipc.linux.process_setup import raise_file_limit
from megatron_ft.ipc.log import COORDINATOR
from megatron_ft.ipc.net.secret import HANDSHAKE_BYTES, CoordinatorHandshake, SecretError
from megatron_ft.ipc.net.secure_channel import FrameError, Role
from megatron_ft.ipc.net.tcp import Peer, format_address
from megatron_ft.ipc.wire import LENGTH_BYTES, PROTOCOL_VERSION, VersionError, decode, encode
from megatron_ft.job.etcd_leader import LeaderInEtcd, LockLost
from megatron_ft.job.parts import HEARD_BY_PARTS
from megatron_ft.job.rules.actions import Broken, CoordinatorEffect, Decided, Drop, Heard, Quit, Send
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.job.rules.messages import TO_LEADER, Beat, Dismiss, FromMember, Hello

_FROM_MEMBER: Vocabulary[FromMember | Ask] = Vocabulary(TO_LEADER | Ask | HEARD_BY_PARTS)
"""``Ask``: from one that has a secret, where this job has none."""

GREETING_S = 10.0
"""Seconds that a new connection has to identify itself."""
_ACCEPTED_AT_ONCE = 1000
MOST_STRANGERS = 256
"""Connections of one address that haven't said hello; a further one is closed at once. A launcher tries again."""
_ASK, _BEAT = encode(Ask())[LENGTH_BYTES:], encode(Beat())
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors for which a waiting connection can't be taken; it stays in the queue."""
FULL_PAUSE_S = 1.0
_SETTLE_SHARE = 0.2
_LONGEST_PAUSE_S = 0.08
"""Share of the time to spend on conclusions, which grow with the number of nodes, unless a pause gets longer than this:
more messages are heard in between then."""
_SHORT_BYTES = 256


def prepare_process() -> None:
    """Make room for thousands of launchers: open files, and memory that isn't searched for garbage all the time.

    What messages leave behind is free at once; a search for cycles takes the longer the more launchers there are.
    """
    raise_file_limit()
    gc.set_threshold(100_000)


class _Link:
    """One launcher's connection."""

    __slots__ = ("address", "fd", "greeted", "handshake", "number", "peer", "since_s", "waits_for_room")

    def __init__(self, number: int, peer: Peer, address: tuple[str, int], secret: bytes | None, now_s: float) -> None:
        self.number = number
        self.peer = peer
        self.fd = peer.fileno()
        self.address = address
        self.handshake = CoordinatorHandshake(secret)
        self.greeted = False
        self.since_s = now_s
        self.waits_for_room = False


class Service:
    """The leader on sockets. Counts what it sends.

    Args:
        owner: pidfd of the launcher that started it.
        keep: gives the record of a decision to that launcher, and returns once it has it.
        say: gets a line for the user.
        etcd: where the lock is, and decisions are kept; None: the lock is the listener.
    """

    def __init__(
        self,
        listener: socket.socket,
        machine: Coordinator,
        *,
        secret: bytes | None,
        owner: int,
        keep: Callable[[DecisionRecord], None],
        say: Callable[[str], None] = lambda _text: None,
        etcd: LeaderInEtcd | None = None,
    ) -> None:
        self.bytes_sent = 0
        self._etcd = etcd
        self._keep = keep
        self._say = say
        self._machine = machine
        self._secret = secret
        self._listener = listener
        self._epoll = select.epoll()
        self._watch_listener()
        self._owner = owner
        self._epoll.register(owner, select.EPOLLIN)
        if etcd is not None:
            self._epoll.register(etcd.fileno(), select.EPOLLIN)
        self.links: dict[int, _Link] = {}
        self._by_fd: dict[int, _Link] = {}
        self._ungreeted: dict[int, _Link] = {}
        """Connections without a hello, the oldest first."""
        self._strangers: Counter[str] = Counter()
        """Number of ``_ungreeted`` by address."""
        self._dirty: set[int] = set()
        self._next = 1
        self._settle_s = 0.0
        """Time before which the job isn't settled."""
        self._full_until_s: float | None = None
        """Until then the listener isn't watched, because no connection can be taken; None: it is."""
        self._has_been_full = False
        self._limiter = RateLimiter()
        self._is_over = False

    def run(self) -> None:
        """Serve until no launcher needs a coordinator any more."""
        while not self._is_over:
            self.run_once()
        self.close()

    def run_once(self) -> None:
        """Wait for something, and do what follows."""
        due_s = self._settle_s if self._machine.needs_settling else max(self._machine.alarm_s, self._settle_s)
        if self._ungreeted:
            due_s = min(due_s, next(iter(self._ungreeted.values())).since_s + GREETING_S)
        if self._etcd is not None:
            due_s = min(due_s, self._etcd.due_s)
        for fd, events in self._epoll.poll(max(0.0, due_s - time.monotonic()), len(self._by_fd) + 2):
            self._serve(fd, events)
        now_s = time.monotonic()
        if self._etcd is not None:
            self._etcd.renew(now_s)
        if self._full_until_s is not None and now_s >= self._full_until_s:
            self._full_until_s = None
            self._watch_listener()
        self._drop_late(now_s)
        if now_s >= self._settle_s and (self._machine.needs_settling or now_s >= self._machine.alarm_s):
            effects = self._machine.settle(now_s)
            took_s = time.monotonic() - now_s
            self._do(effects)
            self._settle_s = time.monotonic() + min(took_s * (1 / _SETTLE_SHARE - 1), _LONGEST_PAUSE_S)
        self._flush()

    def _serve(self, fd: int, events: int) -> None:
        link = self._by_fd.get(fd)
        if link is not None:
            if events & ~select.EPOLLIN:
                self._dirty.add(link.number)
            if events & ~select.EPOLLOUT:
                self._read(link)
        elif fd == self._listener.fileno():
            self._accept()
        elif fd == self._owner:
            self._epoll.unregister(fd)
            self._machine.orphaned()
        elif self._etcd is not None and fd == self._etcd.fileno():
            self._hear_etcd(self._etcd)

    def _watch_listener(self) -> None:
        self._epoll.register(self._listener, select.EPOLLIN)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno in _FULL:
                    self._pause_accepting(error)
                return  # else the queue is empty
            if self._strangers[address[0]] >= MOST_STRANGERS:
                sock.close()
                continue
            allowance = None if self._secret is None else HANDSHAKE_BYTES
            peer = Peer(sock, allowance=allowance)
            link = _Link(self._next, peer, address, self._secret, time.monotonic())
            self._next += 1
            self.links[link.number] = self._ungreeted[link.number] = self._by_fd[link.fd] = link
            self._strangers[address[0]] += 1
            self._epoll.register(link.fd, select.EPOLLIN)
            first = link.handshake.first()
            if first is not None:
                self._write(link, encode(first))

    def _greet(self, link: _Link) -> None:
        """Count a connection as a stranger's no more."""
        if self._ungreeted.pop(link.number, None) is not None:
            self._strangers[link.address[0]] -= 1
            if not self._strangers[link.address[0]]:
                del self._strangers[link.address[0]]

    def _pause_accepting(self, error: OSError) -> None:
        """Stop watching the listener for a while: it stays readable, and leaving it registered would busy-loop."""
        self._epoll.unregister(self._listener)
        self._full_until_s = time.monotonic() + FULL_PAUSE_S
        if not self._has_been_full:
            self._has_been_full = True
            text = f"no more launchers can be let in beside {len(self.links)} connections ({error.strerror})"
            self._say(f"{text}: trying again every {FULL_PAUSE_S:g} s; raise the limit of open files (ulimit -Hn)")

    def _read(self, link: _Link) -> None:
        for message in self._messages(link):
            COORDINATOR.debug("from launcher", link.number, message)
            if effects := self._machine.handle(Heard(link.number, message), time.monotonic()):
                self._do(effects)
            if link.number not in self.links:
                return  # the connection was dropped: its remaining messages are ignored
        if not link.peer.is_open:
            self._forget(link)

    def _messages(self, link: _Link) -> Iterator[FromMember]:
        """Messages for the machine. Who breaks the protocol is disconnected; a launcher is sent the reason first."""
        try:
            for body in link.peer.read_bodies():
                message = self._message(link, body)
                if message is not None:
                    yield message
        except VersionError as error:
            text = f"its coordinator speaks version {PROTOCOL_VERSION} of the protocol, this launcher {error.theirs}"
            self._close_with(link, Dismiss(2, text))
        except SecretError:
            self._close_with(link, Denied())
        except FrameError as error:
            text = f"closed the connection from {format_address(*link.address[:2])}: {error}"
            if line := self._limiter.admit(text, time.monotonic()):
                self._say(line)
            link.peer.give_up()
        except ProtocolError:
            link.peer.give_up()  # a port scanner: it sees the end of the connection

    def _message(self, link: _Link, body: bytes) -> FromMember | None:
        """Return the message for the machine, None for one of the handshake."""
        if not link.handshake.is_done:
            if body == _ASK:
                return None  # the challenge is on its way
            answer = link.handshake.answer(_read_handshake(body))
            if answer is not None:
                self._write(link, encode(answer))
            if link.handshake.session is not None:
                link.peer.secure(link.handshake.session.channel(Role.LISTENS))
            return None
        parsed = _read_short(body) if len(body) <= _SHORT_BYTES else _read(body)
        if isinstance(parsed, Ask) and self._secret is None and not link.greeted:
            # it has a secret: with a coordinator without one it doesn't speak
            self._close_with(link, Open())
            return None
        if isinstance(parsed, Ask) or link.greeted is isinstance(parsed, Hello):
            raise ProtocolError("a hello in another place than the first")
        if not link.greeted:
            link.greeted = True
            self._greet(link)
        return parsed

    def _close_with(self, link: _Link, message: Open | Denied | Dismiss) -> None:
        link.peer.write(encode(message))
        link.peer.flush()
        link.peer.give_up()

    def _drop_late(self, now_s: float) -> None:
        while self._ungreeted:
            link = next(iter(self._ungreeted.values()))
            if now_s - link.since_s <= GREETING_S:
                return
            self._forget(link)

    def _forget(self, link: _Link) -> None:
        if self.links.pop(link.number, None) is None:
            return
        self._greet(link)
        del self._by_fd[link.fd]
        link.peer.close()
        if link.greeted:
            broken = Broken(link.number, silent=link.peer.is_silent, reset=link.peer.is_reset)
            self._do(self._machine.handle(broken, time.monotonic()))

    def _hear_etcd(self, etcd: LeaderInEtcd) -> None:
        """Say what was waiting for etcd, or end with the lock. A change that can't be made ends the job at last."""
        try:
            made = etcd.take()
        except LockLost:
            self._is_over = True
            return
        self._machine.lock_answers(not etcd.problem)
        for effect in made:
            self._carry_out(effect)
        if (dismissal := etcd.gives_up(self._machine.rules, time.monotonic())) is not None:
            for link in list(self.links.values()):
                self._close_with(link, dismissal)
            self._is_over = True

    def _do(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects if self._etcd is None else self._etcd.admit(effects):
            self._carry_out(effect)

    def _carry_out(self, effect: CoordinatorEffect) -> None:
        COORDINATOR.debug("effect", effect)
        match effect:
            case Send(numbers, message):
                data = _BEAT if message == Beat() else encode(message)
                for number in numbers:
                    if (link := self.links.get(number)) is not None:
                        self._write(link, data)
            case Drop(number):
                if (link := self.links.get(number)) is not None:
                    link.peer.flush()
                    link.greeted = False  # the machine knows
                    self._forget(link)
            case Decided(record):
                self._keep(record)
            case Quit():
                self._is_over = True

    def _write(self, link: _Link, data: bytes) -> None:
        self.bytes_sent += link.peer.write(data)
        self._dirty.add(link.number)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, set()
        for number in dirty:
            link = self.links.get(number)
            if link is None:
                continue
            waits = not link.peer.flush()
            if not link.peer.is_open:
                self._forget(link)
            elif waits is not link.waits_for_room:
                link.waits_for_room = waits
                self._epoll.modify(link.fd, select.EPOLLIN | (select.EPOLLOUT if waits else 0))

    def close(self) -> None:
        for link in self.links.values():
            link.peer.flush()
            link.peer.close()
        self._epoll.close()
        self._listener.close()
        os.close(self._owner)


def _read_handshake(body: bytes) -> Handshake:
    message = decode(body)
    try:
        return HANDSHAKE.parse(message)
    except ProtocolError as error:  # the hello of a launcher without a secret, say: it is told
        raise SecretError(str(error)) from None


def _read(body: bytes) -> FromMember | Ask:
    return _FROM_MEMBER.parse(decode(body))


_read_short = functools.lru_cache(maxsize=1024)(_read)
"""Cache of parsed bodies: simultaneous answers of thousands of launchers are equal, byte by byte."""
