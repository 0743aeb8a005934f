"""What an agent uses of its launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.base.orphan_watch import OrphanWatch
from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.base.stop_requests import StopRequests
from megatron_ft.launcher.cycle.control_socket import ControlSocket
from megatron_ft.launcher.cycle.job_status import JobStatus

__all__ = ["LauncherServices"]


@dataclass(frozen=True, kw_only=True)
class LauncherServices:
    """The event loop, what comes in by it, and where the agent reports."""

    line: CommandLine
    reactor: Reactor
    signals: SignalWatch
    stop: StopRequests
    orphan_watch: OrphanWatch
    control: ControlSocket
    log: EventLog
    say: Callable[[str], None]
    status: JobStatus
