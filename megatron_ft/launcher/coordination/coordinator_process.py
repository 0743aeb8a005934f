"""The coordinator process of this launcher, on a listening socket that outlives it.

Where the job begins it is started at once, elsewhere when the first connection comes. If it dies, connections wait in
the socket for the next one. It is a child of the launcher, and stays behind if others need it when that ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping

from megatron_ft.core.codec import encode
from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.core.job.messages import JobDefinition
from megatron_ft.ipc.linux.process_setup import isolated_command
from megatron_ft.ipc.net.tcp import format_address
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.link.reactor import Priority, Reactor, Timer

_QUICK_S = 10.0
_MOST_QUICK = 5
"""Number of coordinators in a row that may end within that time before none is started for a while."""
_PAUSES_S = (0.0, 0.1, 0.3, 1.0)
_REST_S = 10.0
"""Seconds until an endpoint where it was given up is served again: launchers that come later find the job by it."""


class CoordinatorProcess:
    """The socket is this object's from now on. ``address`` is where launchers reach it, ``host:port``.

    Every coordinator at that address is this launcher's own: say so with ``Member.owns``.
    """

    def __init__(
        self,
        reactor: Reactor,
        listener: socket.socket,
        name: str,
        *,
        founds: bool,
        is_endpoint: bool,
        defined: JobDefinition,
        secret: bytes | None,
        environ: Mapping[str, str],
        led_at: Callable[[], str],
        say: Callable[[str], None],
        gave_up: Callable[[str], None],
    ) -> None:
        """Take over the socket, without starting a process.

        Args:
            name: of this host, as others know it.
            founds: this is the first endpoint, where a job begins.
            defined: this launcher's job, which the coordinator is for.
            led_at: where this launcher is led, empty if nowhere (``Member.led_at``).
            say: gets a line each time that a coordinator has died.
            gave_up: gets a line once none can be kept alive. Unless this is an endpoint of the job, the socket is
                closed by then.
            is_endpoint: this is an endpoint of the job: the socket is open as long as this launcher is.
        """
        self.address = format_address(name, listener.getsockname()[1])
        self._reactor = reactor
        self._listener = listener
        self._founds, self._is_endpoint = founds, is_endpoint
        self._job = os.fsdecode(encode(defined))
        self._environment = {key: value for key, value in environ.items() if not key.startswith("FT_SECRET")}
        if secret is not None:
            self._environment["FT_SECRET"] = os.fsdecode(secret)
        self._led_at = led_at
        self._say = say
        self._gave_up = gave_up
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._is_killed = False
        """This launcher has killed the process, and starts another one when a launcher connects."""
        self._started_s = 0.0
        self._quick = 0
        """Number of coordinators in a row that have ended soon after their start."""
        self._timer: Timer | None = None
        self.is_closed = False

    def start(self, *, at_once: bool) -> None:
        """Start a coordinator: now, or when the first launcher connects."""
        if at_once:
            self._start()
        else:
            self._start_on_first_connection()

    def kill(self) -> None:
        """Kill the coordinator that runs. Launchers that connect later get one that knows where the job is led."""
        if self._process is not None and self._pidfd >= 0:
            self._is_killed = True
            self._process.kill()

    def pids(self) -> set[int]:
        """The process id of the coordinator, as long as it runs; also after ``close``."""
        return set() if self._process is None or self._process.poll() is not None else {self._process.pid}

    def close(self) -> None:
        """Start none any more, and let go of the socket. One that runs stays for those who need it, and ends itself."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._reactor.unwatch(self._listener.fileno())
        self._listener.close()
        self._forget_pidfd()

    # -- its life ---------------------------------------------------------------------------------------------

    def _start_on_first_connection(self) -> None:
        if not self.is_closed:
            self._reactor.watch(self._listener.fileno(), self._start)

    def _start(self) -> None:
        self._reactor.unwatch(self._listener.fileno())
        self._started_s = time.monotonic()
        try:
            self._process = self._spawn()
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as error:
            if self._process is not None and self._pidfd < 0:
                self._process.kill()
                self._process.wait()
            self._process = None
            self._ended(f"can't be started ({error.strerror})")
            return
        self._reactor.watch(self._pidfd, self._died, Priority.DEATH)

    def _spawn(self) -> subprocess.Popen[bytes]:
        fd = self._listener.fileno()
        command = [*isolated_command("megatron_ft.coordinator"), "--listen", self.address, "--fd", str(fd)]
        command += ["--owner", str(os.getpid()), "--job", self._job]
        if not self._founds:
            command += ["--takes-over"]
        elsewhere = self._led_at()
        if elsewhere not in ("", self.address):
            command += ["--elsewhere", elsewhere]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[fd],
            env=self._environment,
            start_new_session=True,
        )

    def _died(self) -> None:
        assert self._process is not None
        self._forget_pidfd()
        code = self._process.wait()  # it has ended
        is_killed, self._is_killed = self._is_killed, False
        if code == 0 or is_killed:
            self._quick = 0
            self._start_on_first_connection()  # the job is over, for all who were there
        else:
            self._ended(f"exited ({launcher_lines.exit_code(code)})", tries_again=code != MISTAKE_CODE)

    def _ended(self, how: str, *, tries_again: bool = True) -> None:
        lived_s = time.monotonic() - self._started_s
        self._quick = self._quick + 1 if lived_s < _QUICK_S else 0
        if tries_again and self._is_endpoint and self._quick >= _MOST_QUICK:
            self._timer = self._reactor.call_later(_REST_S, self._start_on_first_connection)
            if self._quick == _MOST_QUICK:
                rest = f"this launcher does not start it again within {_REST_S:g} s"
                self._gave_up(f"the coordinator at {self.address} {how}; {rest}")
            return
        if not tries_again or self._quick >= _MOST_QUICK:
            self.close()
            self._gave_up(f"the coordinator at {self.address} {how}; this launcher does not start it again")
            return
        self._say(f"the coordinator at {self.address} {how}; another one takes over")
        again = self._start if self._founds else self._start_on_first_connection
        pause_s = _PAUSES_S[min(max(0, self._quick - 1), len(_PAUSES_S) - 1)]
        self._timer = self._reactor.call_later(pause_s, again)

    def _forget_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._reactor.unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
