"""The lock of a job, held by a launcher on the endpoint's host: the listening socket, and the leader's process on it.

The socket outlives the process: connections wait in it for the next one. The process writes the record of each
decision to this launcher before any other launcher hears of it; the next process is given the last one. It ends with
this launcher.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping

from megatron_ft.core.codec import decode, encode
from megatron_ft.ipc.linux.process_setup import isolated_command
from megatron_ft.job.rules.decisions import DecisionKind, DecisionRecord
from megatron_ft.job.rules.give_up_policy import HOLDER_STAYS_S
from megatron_ft.job.rules.messages import EtcdSettings, JobDefinition, LeaderStart, LeaseHeld
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.link.reactor import Priority, Reactor, Timer

_QUICK_S = 10.0
_MOST_QUICK = 3
"""Leaders that may end within that time before the next ones are started after a pause."""
PAUSE_S = 5.0
_TAKE_AGAIN_S = 0.5
"""Seconds between two tries to take the endpoint's port, while another process has it."""
_CHUNK = 1 << 20


class EndpointLock:
    """One launcher's try to hold the lock.

    Args:
        address: of the endpoint, ``host:port``.
        defined: this launcher's job, which the leader is for.
        take: listens at the endpoint, if no other process does.
        held: called once this launcher holds the lock.
        say: gets a line each time that a leader has died.
        etcd: the lock is in etcd, and this launcher holds it; ``ended`` is called when the leader has lost it, or has
            nothing to do any more.
    """

    def __init__(
        self,
        reactor: Reactor,
        address: str,
        defined: JobDefinition,
        *,
        listener: socket.socket | None,
        take: Callable[[], socket.socket | None],
        secret: bytes | None,
        environ: Mapping[str, str],
        held: Callable[[], None],
        say: Callable[[str], None],
        etcd: tuple[EtcdSettings, LeaseHeld] | tuple[None, None] = (None, None),
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._etcd, self._ended = etcd, ended
        self._reactor = reactor
        self._address, self._defined = address, defined
        self._listener = listener
        self._take = take
        self._environment = {key: value for key, value in environ.items() if not key.startswith("FT_SECRET")}
        if secret is not None:
            self._environment["FT_SECRET"] = os.fsdecode(secret)
        self._held = held
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = self._records = -1
        """Process, and pipe from which its records are read; -1: none."""
        self._record: DecisionRecord | None = None
        self._written = bytearray()
        """What the process has written of its next record."""
        self._deaths: deque[float] = deque(maxlen=_MOST_QUICK)
        self._timer: Timer | None = None

    def start(self) -> None:
        if self._listener is None:
            self._take_later()
        else:
            self._held()
            self._start_leader()

    def pids(self) -> set[int]:
        """The process id of the leader, as long as it runs."""
        return set() if self._process is None or self._process.poll() is not None else {self._process.pid}

    def close(self, *, is_in_a_hurry: Callable[[], bool]) -> None:
        """Give up the lock. If the job has ended, first wait until the leader has told all launchers, or a minute."""
        if self._timer is not None:
            self._timer.cancel()
        if self._record is not None and self._record.decision.kind is DecisionKind.END:
            until_s = time.monotonic() + HOLDER_STAYS_S + 1.0
            self._reactor.run_until(lambda: self._process is None or is_in_a_hurry(), until_s)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget_process()
        if self._listener is not None:
            self._listener.close()

    def _take_later(self) -> None:
        self._timer = self._reactor.call_later(_TAKE_AGAIN_S, self._try_to_take)

    def _try_to_take(self) -> None:
        self._listener = self._take()
        self.start()

    # -- the leader -------------------------------------------------------------------------------------------

    def _start_leader(self) -> None:
        assert self._listener is not None
        try:
            self._process, begun = self._spawn(self._listener.fileno())
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._forget_process()
            self._died(f"can't be started ({error.strerror})")
            return
        with open(begun, "wb") as file, contextlib.suppress(BrokenPipeError):  # it may have died
            file.write(encode(LeaderStart(self._defined, self._record, *self._etcd)))
        self._reactor.watch(self._records, self._read)
        self._reactor.watch(self._pidfd, self._exited, Priority.DEATH)

    def _spawn(self, listener: int) -> tuple[subprocess.Popen[bytes], int]:
        """Start the process. Return it, and the pipe on which it reads what it begins with."""
        with contextlib.ExitStack() as opened:
            begins, begun = os.pipe()
            opened.callback(os.close, begins)
            self._records, decides = os.pipe()
            opened.callback(os.close, decides)
            os.set_blocking(self._records, False)
            passed = [listener, begins, decides]
            words = ["--listener", str(listener), "--begins", str(begins), "--decides", str(decides)]
            try:
                process = subprocess.Popen(
                    [*isolated_command("megatron_ft.job"), *words, "--owner", str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=passed,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError:
                os.close(begun)
                raise
        return process, begun

    def _read(self) -> None:
        try:
            while data := os.read(self._records, _CHUNK):
                self._written += data
        except BlockingIOError:
            pass
        else:
            self._reactor.unwatch(self._records)  # its end is heard of by the pidfd
        *whole, rest = self._written.split(b"\n")
        self._written = bytearray(rest)
        if whole:
            self._record = decode(DecisionRecord, bytes(whole[-1]))

    def _exited(self) -> None:
        assert self._process is not None
        self._read()  # all that it has decided
        code = self._process.wait()
        self._forget_process()
        if not code and self._etcd[0] is not None:
            self._ended()
        elif code or self._record is None or self._record.decision.kind is not DecisionKind.END:
            self._died(f"exited ({launcher_lines.exit_code(code)})")

    def _died(self, how: str) -> None:
        now_s = time.monotonic()
        self._deaths.append(now_s)
        is_often = len(self._deaths) == _MOST_QUICK and now_s - self._deaths[0] < _QUICK_S
        pause_s = PAUSE_S if is_often else 0.0
        follows = f"starting another one in {pause_s:g} s" if is_often else "another one takes over"
        self._say(f"the coordinator at {self._address} {how}; {follows}")
        self._timer = self._reactor.call_later(pause_s, self._start_leader)

    def _forget_process(self) -> None:
        for fd in (self._records, self._pidfd):
            if fd >= 0:
                self._reactor.unwatch(fd)
                os.close(fd)
        self._process, self._records, self._pidfd, self._written = None, -1, -1, bytearray()
