"""What an agent uses of its launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ft.core.timeouts.raised import RaisedTimeouts
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.base.orphan_watch import OrphanWatch
from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.base.stop_requests import StopRequests
from megatron_ft.launcher.cycle.control_socket import ControlSocket
from megatron_ft.launcher.cycle.job_status import JobStatus
from megatron_ft.launcher.cycle.reference_names import CycleInfo
from megatron_ft.launcher.cycle.starting import RankStarter
from megatron_ft.launcher.monitors.monitors import Monitors
from megatron_ft.launcher.processes.crash_evidence import CrashEvidence
from megatron_ft.launcher.processes.device_memory import DeviceMemory
from megatron_ft.launcher.processes.health_command import HealthCheck
from megatron_ft.launcher.processes.ranks import Ranks
from megatron_ft.launcher.processes.termination import Termination

__all__ = ["LauncherServices", "RankServices"]


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


@dataclass(frozen=True, kw_only=True)
class RankServices:
    """What watches, starts and ends the ranks of this node."""

    monitors: Monitors
    health: HealthCheck | None
    """None: no health check is asked for."""
    starter: RankStarter
    running: Ranks
    raised_timeouts: RaisedTimeouts
    termination: Termination
    device_memory: DeviceMemory
    crash_evidence: CrashEvidence
    cycle_info: CycleInfo | None
    """None: ``--ft-cycle-info-dir`` isn't given."""
