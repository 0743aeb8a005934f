"""``RankMonitorServer``: a rank monitor without a launcher, for tests and custom launchers."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from megatron_ft.config.config import ConfigValues
from megatron_ft.link import wire
from megatron_ft.monitor import process as monitor_process


class MonitorHandle:
    """The monitor process, with the methods of ``multiprocessing.Process`` that callers use."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.name = f"RankMonitor-{process.pid}"

    def __getattr__(self, name: str) -> Any:
        """Return ``pid``, ``terminate`` or ``kill`` of the process. The socket file stays, also after ``kill``."""
        return getattr(self._process, name)

    @property
    def exitcode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


class RankMonitorServer:
    """Starter of rank monitors."""

    @staticmethod
    def run_in_subprocess(
        cfg: ConfigValues,
        ipc_socket_path: str,
        is_restarter_logger: bool = False,
        mp_ctx: Any = None,
        env: Mapping[str, str] | None = None,
    ) -> MonitorHandle:
        """Start a monitor that serves one rank at a time and listens at ``ipc_socket_path`` on return.

        Args:
            cfg: its configuration; later changes to the object don't reach the monitor.
            ipc_socket_path: any path; the socket gets mode 0600. Ranks find it in FT_RANK_MONITOR_IPC_SOCKET.
            is_restarter_logger: accepted for existing callers, without effect.
            mp_ctx: accepted for existing callers, without effect: the monitor is a fresh interpreter, never a fork.
            env: variables added to the caller's environment, or replacing them.

        Raises:
            OSError: the path can't be bound.
        """
        listener = wire.listen(str(ipc_socket_path))
        try:
            process = monitor_process.spawn(
                listen_fd=listener.fileno(),
                socket_path=str(ipc_socket_path),
                local_rank=0,
                options=monitor_process.MonitorOptions(config=cfg),
                env={**os.environ, **(env or {})},
            )
        finally:
            listener.close()
        return MonitorHandle(process)
