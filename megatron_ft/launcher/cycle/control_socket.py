"""Socket for requests of ranks (``FT_LAUNCHER_IPC_SOCKET``) and ``megatron-ft`` to this node's launcher."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from msgspec.structs import replace

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.control import WorkloadAction, WorkloadControl
from megatron_ft.link.base.rate_limiter import RateLimiter
from megatron_ft.link.base.wording import printable
from megatron_ft.link.messages.control_messages import (
    REQUESTS,
    Answer,
    Ok,
    Request,
    Status,
)
from megatron_ft.link.messages.job_facts import JobFacts
from megatron_ft.link.messages.monitor_messages import Pause, Resume
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import Channel, ChannelClosedError, check_peer, listen

_MOST_CONNECTIONS = 256
_BACKLOG = 128
_MAX_DESCRIPTION = 500


@dataclass
class ControlSocket:
    """Serves requests. A request that a rank sent just before it died is read, too: it stays in the socket."""

    path: str
    reactor: Reactor
    _: KW_ONLY
    say: Callable[[str], None]
    on_request: Callable[[WorkloadControl], None]
    """Gets the requests of ranks."""
    on_order: Callable[[Pause | Resume, int], bool]
    """Handles ``megatron-ft pause`` and ``resume``, given the sender's PID; True if it has an effect."""
    on_question: Callable[[], JobFacts]
    """Answers ``megatron-ft status``."""
    _channels: dict[int, tuple[Channel, int]] = field(default_factory=dict)
    listener: socket.socket | None = None
    _complaints: RateLimiter = field(default_factory=RateLimiter)
    _idle_requests: RateLimiter = field(default_factory=RateLimiter)

    def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: the path can't be used.
        """
        self.listener = listen(self.path, _BACKLOG)
        self.reactor.watch(self.listener.fileno(), self.accept_all)

    def listen_again(self) -> None:
        """Recreate the socket, which was removed; connections stay open.

        Raises:
            OSError: the path can't be used.
        """
        lost = self.listener
        assert lost is not None
        self.start()
        self.reactor.unwatch(lost.fileno())
        lost.close()

    def accept_all(self) -> None:
        """Accept all waiting connections, and read from them."""
        for _ in range(_BACKLOG + 1):  # bounded: later connections have their turn after others that wait
            if self.listener is None:
                return
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self._admit(sock)

    def close(self) -> None:
        """Close the socket and all connections."""
        for fd in list(self._channels):
            self._drop(fd)
        if self.listener is None:
            return
        self.reactor.unwatch(self.listener.fileno())
        self.listener.close()
        self.listener = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _admit(self, sock: socket.socket) -> None:
        try:
            pid = check_peer(sock)
        except (ProtocolError, OSError):
            sock.close()
            return
        if len(self._channels) >= _MOST_CONNECTIONS:
            self._drop(next(iter(self._channels)))
        channel = Channel(sock, takes_fds=False)
        fd = channel.fileno()
        self._channels[fd] = (channel, pid)
        self.reactor.watch(fd, lambda: self._read(fd))
        self._read(fd)

    def _read(self, fd: int) -> None:
        channel, pid = self._channels[fd]
        try:
            received = channel.receive(everything=False)  # leaves other connections their turn
            for answer in [self._take(REQUESTS.parse(item.message), pid) for item in received]:
                # a client that has disconnected counts as answered; one that doesn't read blocks nothing
                channel.send(answer, timeout_s=0.0)
        except ChannelClosedError:
            self._drop(fd)
        except ProtocolError as error:
            line = f"process {pid} sent a request that can't be read: {error}"
            if (text := self._complaints.admit(line, time.monotonic())) is not None:
                self.say(text)
            self._drop(fd)

    def _take(self, asked: Request, pid: int) -> Answer:
        """Act on one message. Return the answer."""
        if isinstance(asked, Status):
            return self.on_question()
        if isinstance(asked, Pause | Resume):
            return Ok(changed=self.on_order(asked, pid))
        # control sequences for a terminal, and characters that no file can hold, are replaced
        words = printable(asked.description[: 2 * _MAX_DESCRIPTION]).split()
        request = replace(asked, description=" ".join(words)[:_MAX_DESCRIPTION], pid=pid)
        # "Continue" only leaves a record in the log, and repetitions are logged at a limited rate
        if (
            request.action != WorkloadAction.Continue.name
            or self._idle_requests.admit("", time.monotonic()) is not None
        ):
            self.on_request(request)
        return Ok()

    def _drop(self, fd: int) -> None:
        channel, _ = self._channels.pop(fd)
        self.reactor.unwatch(fd)
        channel.close()
