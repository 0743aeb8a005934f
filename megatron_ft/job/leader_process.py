"""The leader's process of the launcher that holds the lock: started on a listening socket, and again if it dies.

The socket outlives the process: connections wait in it for the next one. The process reads from a pipe what it begins
with, and writes the record of each decision to another one before any other launcher hears of it; the next process is
given the last one. It ends with this launcher.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping

from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.member import HOLDER_STAYS_S
from megatron_ft.job.rules.messages import EtcdSettings, JobDefinition, LeaderStart, LeaseHeld
from megatron_ft.link.base.codec import decode, encode
from megatron_ft.link.base.signal_rules import exit_words
from megatron_ft.link.linux.process_setup import isolated_command
from megatron_ft.link.reactor import Priority, Reactor, Timer

_QUICK_S = 10.0
_MOST_QUICK = 3
"""Leaders that may end within that time before the next ones are started after a pause."""
PAUSE_S = 5.0
_CHUNK = 1 << 20


class LeaderProcess:
    """The process, while this launcher holds the lock.

    Args:
        defined: this launcher's job, which the leader is for.
        say: gets a line each time that a leader has died.
    """

    def __init__(
        self,
        reactor: Reactor,
        defined: JobDefinition,
        *,
        secret: bytes | None,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._reactor, self._defined, self._say = reactor, defined, say
        self._environment = {key: value for key, value in environ.items() if not key.startswith("FT_SECRET")}
        if secret is not None:
            self._environment["FT_SECRET"] = os.fsdecode(secret)
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._record: DecisionRecord | None = None
        self._written = b""
        """What the process has written of its next record."""
        self._deaths: deque[float] = deque(maxlen=_MOST_QUICK)
        self._timer: Timer | None = None
        self._listener: socket.socket | None = None

    def begin(
        self,
        address: str,
        listener: socket.socket,
        etcd: tuple[EtcdSettings, LeaseHeld] | tuple[None, None] = (None, None),
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the leader on the socket, at which others reach it by ``address``.

        Args:
            etcd: the lock is there, not the socket; ``ended`` is called when the leader has lost it, or has nothing to
                do any more.
        """
        self._address, self._listener, self._etcd, self._ended, self._record = address, listener, etcd, ended, None
        self._start()

    def pids(self) -> set[int]:
        """The process id of the leader, as long as it runs."""
        return set() if self._process is None or self._process.poll() is not None else {self._process.pid}

    def close(self, *, is_in_a_hurry: Callable[[], bool] = lambda: True) -> None:
        """Close the socket. If the job has ended, first wait until the leader has told all launchers, or a minute."""
        if self._timer is not None:
            self._timer.cancel()
        if self._has_ended:
            until_s = time.monotonic() + HOLDER_STAYS_S + 1.0
            self._reactor.run_until(lambda: self._process is None or is_in_a_hurry(), until_s)
        self._kill()
        if self._listener is not None:
            self._listener.close()

    @property
    def _has_ended(self) -> bool:
        """True if the job has: its end is decided."""
        return self._record is not None and self._record.decision.kind is DecisionKind.END

    def _start(self) -> None:
        assert self._listener is not None
        words = ["--listener", str(self._listener.fileno()), "--owner", str(os.getpid())]
        try:
            self._process = process = subprocess.Popen(
                [*isolated_command("megatron_ft.job"), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._listener.fileno()],
                env=self._environment,
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            self._kill()
            self._died(f"can't be started ({error.strerror})")
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # it may have died
            pipe.write(encode(LeaderStart(self._defined, self._record, *self._etcd)))
        os.set_blocking(process.stdout.fileno(), False)
        self._reactor.watch(process.stdout.fileno(), self._read)
        self._reactor.watch(self._pidfd, self._exited, Priority.DEATH)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        records = self._process.stdout.fileno()
        try:
            while data := os.read(records, _CHUNK):
                self._written += data
        except BlockingIOError:
            pass
        else:
            self._reactor.unwatch(records)  # its end is heard of by the pidfd
        *whole, self._written = self._written.split(b"\n")
        if whole:
            self._record = decode(DecisionRecord, whole[-1])

    def _exited(self) -> None:
        assert self._process is not None
        self._read()  # all that it has decided
        code = self._process.wait()
        self._kill()
        if not code and self._etcd[0] is not None:
            self._ended()
        elif code or not self._has_ended:
            self._died(f"exited ({exit_words(code)})")

    def _died(self, how: str) -> None:
        now_s = time.monotonic()
        self._deaths.append(now_s)
        is_often = len(self._deaths) == _MOST_QUICK and now_s - self._deaths[0] < _QUICK_S
        pause_s = PAUSE_S if is_often else 0.0
        follows = f"starting another one in {pause_s:g} s" if is_often else "another one takes over"
        self._say(f"the coordinator at {self._address} {how}; {follows}")
        self._timer = self._reactor.call_later(pause_s, self._start)

    def _kill(self) -> None:
        """Kill and forget the process, if there is one."""
        process, self._process, self._written = self._process, None, b""
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        self._reactor.unwatch(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        if self._pidfd >= 0:
            self._reactor.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
