"""A helper process of the launcher, with a channel to it: a rank monitor, or the keeper of memory checkpoints."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.codec import Fact, Message, Raw
from megatron_ft.link.base.signal_rules import exit_words
from megatron_ft.link.linux.processes import is_gone, send_signal, wait_gone
from megatron_ft.link.reactor import Priority, Reactor
from megatron_ft.link.wire import Channel, ChannelClosedError, Received, close_fds

unreaped: set[int] = set()
"""PIDs of all helper processes of this launcher, killed ones that haven't ended included."""


class HelperProcess:
    """One process, until it was reaped. It may never end, if the kernel hangs: another one can be started before.

    Args:
        spawn: starts it, given the descriptor of its end of the channel.
        parse: reads a message; ProtocolError if it can't be read.
        take: gets each message with its descriptors, which it closes. It may raise ProtocolError, too.
        ended: is called once, with how the process has ended, or which message of it can't be read.

    Raises:
        OSError: it can't be started.
    """

    def __init__(
        self,
        reactor: Reactor,
        spawn: Callable[[int], subprocess.Popen[bytes]],
        *,
        parse: Callable[[Raw], Any],
        take: Callable[[Any, tuple[int, ...]], None],
        ended: Callable[[str], None],
    ) -> None:
        self._reactor, self._parse, self._take, self._ended = reactor, parse, take, ended
        ours, theirs = socket.socketpair()
        try:
            self._process = spawn(theirs.fileno())
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid, self.started_s = self._process.pid, time.monotonic()
        unreaped.add(self.pid)
        self._channel: Channel | None = Channel(ours)
        self._channel_fd = ours.fileno()
        reactor.watch(self._channel_fd, self.read)
        reactor.watch(self._pidfd, self._died, Priority.DEATH)

    @property
    def is_alive(self) -> bool:
        """True until the process has ended."""
        return self.pid in unreaped and not is_gone(self._pidfd)

    def send(self, message: Message | Fact, fds: Sequence[int] = (), *, timeout_s: float) -> None:
        """Send a message; a process that doesn't take it in time is killed."""
        if self._channel is not None:
            try:
                self._channel.send(message, fds, timeout_s=timeout_s)
            except ChannelClosedError:
                self._kill()

    def read(self) -> None:
        """Take all messages that have come. A process that sends others is killed."""
        channel, problem = self._channel, ""
        if channel is None:
            return
        received = deque[Received]()
        try:
            received.extend(channel.receive())
            while received:
                message = self._parse(received[0].message)
                self._take(message, received.popleft().fds)
            return
        except ChannelClosedError:
            pass  # the process is ending: its pidfd reports that
        except ProtocolError as error:
            problem = f"sent a message that the launcher can't read: {error}"
        for _, fds in received:
            close_fds(fds)
        if channel is self._channel:  # otherwise a message led to an order, which found it closed
            self._kill()
            if problem:
                self._tell(problem)

    def dismiss(self) -> None:
        """Take what has come, and kill the process; ``ended`` isn't called any more."""
        self._ended = _tell_nobody
        self.read()
        self._kill()

    def wait(self, until_s: float) -> None:
        """Wait for the end of the process until then (time.monotonic), and take what it has sent."""
        if self.pid in unreaped and wait_gone(self._pidfd, max(0.0, until_s - time.monotonic())):
            self._died()

    def _kill(self) -> None:
        if self._channel is not None:
            self._reactor.unwatch(self._channel_fd)
            self._channel.close()
            self._channel = None
        if self.pid in unreaped:
            send_signal(self._pidfd, signal.SIGKILL)

    def _died(self) -> None:
        self.read()
        self._kill()
        code = self._process.wait()
        unreaped.discard(self.pid)
        self._reactor.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._tell(f"exited ({exit_words(code)})")

    def _tell(self, how: str) -> None:
        ended, self._ended = self._ended, _tell_nobody
        ended(how)


def _tell_nobody(_how: str) -> None:
    pass
