"""The leader's process of the launcher that holds the lock: started on a listening socket, and again if it dies.

The socket outlives the process: connections wait in it for the next one. The process reads from a pipe what it begins
with, and writes the record of each decision to another one before any other launcher hears of it; the next process is
given the last one. It ends with this launcher.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import time
from collections.abc import Callable

from msgspec.structs import replace

from megatron_ft.job.endpoint import listen_at
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.etcd_keys import Seen
from megatron_ft.job.rules.member import HOLDER_STAYS_S, Member
from megatron_ft.job.rules.messages import LeaderStart
from megatron_ft.link.base.codec import decode, encode
from megatron_ft.link.base.signal_rules import exit_words
from megatron_ft.link.linux.process_setup import isolated_command
from megatron_ft.link.reactor import Reactor, Timer
from megatron_ft.link.tcp import parse_address

PAUSE_S = 3.0
"""Seconds from the start of a leader to that of the next one, at least."""
TAKE_AGAIN_S = 0.5
"""Seconds between two tries to take the endpoint's port, while another process has it."""
_CHUNK = 1 << 20


class LeaderProcess:
    """The process, while this launcher holds the lock.

    Args:
        member: of this launcher; it is told once the endpoint's port is held.
        start: what the leader is told, without what comes with the lock.
        say: gets a line each time that a leader has died.
    """

    def __init__(self, reactor: Reactor, member: Member, start: LeaderStart, say: Callable[[str], None]) -> None:
        self.has_quit = False
        """The leader has done its work, or has lost the lock in etcd."""
        self.lock: Seen | None = None
        """The lock that the leader is for, from ``begin`` to ``close``."""
        self._reactor, self._member, self._told, self._say = reactor, member, start, say
        self._process: subprocess.Popen[bytes] | None = None
        self._written = b""
        """What the process has written of its next record."""
        self._timer: Timer | None = None
        self._listener: socket.socket | None = None

    def begin(self, lock: Seen, listener: socket.socket | None) -> None:
        """Start the leader on a socket, at which others reach it by the address of the lock.

        ``listener`` None: the endpoint's port, as soon as no other launcher of this host holds it.
        """
        self.lock, self._address, self._listener, self.has_quit = lock, lock.address, listener, False
        self._told = replace(self._told, record=None, epoch=lock.epoch, lease=lock.lease)
        self._start()

    def pids(self) -> set[int]:
        """The process id of the leader, as long as it runs."""
        return set() if self._process is None else {self._process.pid}

    def close(self, *, is_in_a_hurry: Callable[[], bool] = lambda: True) -> None:
        """Close the socket. If the job has ended, first wait until the leader has told all launchers, or a minute."""
        if self._told.record is not None and self._told.record.decision.kind is DecisionKind.END:
            until_s = time.monotonic() + HOLDER_STAYS_S + 1.0
            self._reactor.run_until(lambda: self._process is None or is_in_a_hurry(), until_s)
        if self._timer is not None:
            self._timer.cancel()
        if self._process is not None:
            self._process.kill()
            self._reap(self._process)
        if self._listener is not None:
            self._listener.close()
        self.lock = None

    def _start(self) -> None:
        try:
            self._listener = self._listener or listen_at(*parse_address(self._address))
        except OSError:
            self._timer = self._reactor.call_later(TAKE_AGAIN_S, self._start)
            return
        self._member.owns = self._told.etcd is None
        self._started_s, fd = time.monotonic(), self._listener.fileno()
        try:
            process = subprocess.Popen(
                [*isolated_command("megatron_ft.job"), str(os.getpid()), str(fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[fd],
                start_new_session=True,
            )
        except OSError as error:
            self._replace(f"can't be started ({error.strerror})")
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it may have died
            pipe.write(encode(self._told))
        os.set_blocking(process.stdout.fileno(), False)
        self._reactor.watch(process.stdout.fileno(), functools.partial(self._read, process))
        self._process = process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Take what the process has decided. The end of the pipe is that of the process."""
        assert process.stdout is not None
        is_over = False
        with contextlib.suppress(BlockingIOError):
            while data := os.read(process.stdout.fileno(), _CHUNK):
                self._written += data
            is_over = True
        *whole, self._written = self._written.split(b"\n")
        if whole:
            self._told = replace(self._told, record=decode(DecisionRecord, whole[-1]))
        if is_over:
            code = self._reap(process)
            self.has_quit = not code
            if code:
                self._replace(f"exited ({exit_words(code)})")

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdout is not None
        self._reactor.unwatch(process.stdout.fileno())
        self._process, self._written = None, b""
        with process:  # closes its pipes
            return process.wait()

    def _replace(self, how: str) -> None:
        self._say(f"the coordinator at {self._address} {how}; another one takes over")
        self._timer = self._reactor.call_later(self._started_s + PAUSE_S - time.monotonic(), self._start)
