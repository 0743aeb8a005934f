"""``python -m megatron_ft.monitor``: the rank monitor, one process per rank. Started by ``ft_launcher``."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys

from megatron_ft.link.linux.process_setup import go_on_without_parent, set_name
from megatron_ft.link.log import MONITOR
from megatron_ft.link.wire import Channel
from megatron_ft.monitor.process import MonitorSettings, parse
from megatron_ft.monitor.reports import Reports
from megatron_ft.monitor.service import MonitorService
from megatron_ft.records.event_log import EventLog, NullEventLog


def main() -> None:
    """Read the command line and serve."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("The rank monitor is started by ft_launcher, or by RankMonitorServer.run_in_subprocess.")
        raise SystemExit(2)
    settings = parse(sys.argv[1:])
    MONITOR.set_level(settings.config.log_level)
    go_on_without_parent()  # a monitor that was stopped while its launcher was killed still has to terminate the rank
    parent_pidfd = _parent_pidfd(settings.parent)
    signal_fd = _route_signals()
    set_name(f"ft_monitor_{settings.local_rank}".encode())
    fd = settings.launcher_fd
    launcher = None if fd is None else Channel(socket.socket(fileno=fd), takes_fds=False)
    reports = Reports(functools.partial(_open_log, settings), launcher, local_rank=settings.local_rank)
    MonitorService(settings, reports, signal_fd, parent_pidfd).run()


def _parent_pidfd(parent: int) -> int:
    """Return a descriptor that becomes readable when the process that started this monitor ends."""
    pidfd = os.pidfd_open(os.getppid())
    if os.getppid() == parent:
        return pidfd
    # the parent died before it could be watched, and this process was adopted: report its end at once
    os.close(pidfd)
    ended, writer = os.pipe2(os.O_CLOEXEC)
    os.close(writer)
    return ended


def _route_signals() -> int:
    """Make signals readable from a descriptor, so that the loop has one place to wait."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    # A launcher may be given minutes to end its ranks by SIGTERM, and some schedulers signal every process of a job:
    # monitors stay until the launcher sends Stop.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
        signal.signal(number, lambda _number, _frame: None)
    return read_fd


def _open_log(settings: MonitorSettings) -> EventLog:
    if settings.log_dir is None:
        return NullEventLog()
    return EventLog.open(
        settings.log_dir,
        role="monitor",
        run_id=settings.run_id,
        name=f"local{settings.local_rank}",
        max_bytes=settings.log_max_bytes,
        local_rank=settings.local_rank,
    )


if __name__ == "__main__":
    main()
