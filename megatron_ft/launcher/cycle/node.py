"""Resources of one node's launcher, opened at the start of the job and closed at its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence

from megatron_ft.config.launcher_options import MIN_HEALTHY
from megatron_ft.errors import ConfigError, FaultToleranceError
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.base.directories import RunDirectory
from megatron_ft.launcher.base.orphan_watch import OrphanWatch
from megatron_ft.launcher.base.rank_environment import why_fresh
from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.cycle.control_socket import ControlSocket
from megatron_ft.launcher.cycle.job_status import JobStatus
from megatron_ft.launcher.processes.health_command import HealthCheck, command_of, job_directories
from megatron_ft.launcher.processes.monitors import Monitors, MonitorSlot
from megatron_ft.launcher.processes.rank_logs import inherited_streams
from megatron_ft.launcher.processes.worker import Worker
from megatron_ft.launcher.rules.events import Event, LauncherExit
from megatron_ft.launcher.schedulers import schedulers
from megatron_ft.link import helper_process, process_tree
from megatron_ft.link.base.hosts import segment_file
from megatron_ft.link.facts.all_kinds import Record
from megatron_ft.link.facts.launcher import Abandoned, SignalForwarded
from megatron_ft.link.file_queue import bounded_call
from megatron_ft.link.linux.process_setup import become_subreaper
from megatron_ft.link.linux.processes import send_signal, would_end_by
from megatron_ft.link.reactor import Priority, Reactor
from megatron_ft.link.secret import read_secret
from megatron_ft.memory.base import digests
from megatron_ft.memory.launcher.keeper_process import Keeper
from megatron_ft.memory.launcher.snapshot_files import SnapshotFiles
from megatron_ft.monitor.process import MonitorOptions
from megatron_ft.records.event_log import EventLog
from megatron_ft.records.launcher.telemetry import Telemetry
from megatron_ft.run_ahead.forking_spawner import ForkingSpawner, ServerProcess


class LauncherNode:
    """Parts of this node's launcher: event loop, event sources, outputs, other processes."""

    def __init__(
        self,
        line: CommandLine,
        *,
        ranks: int,
        log: EventLog,
        log_dir: str | None,
        say: Callable[[str], None],
        announce: Callable[[str], None],
        server: ServerProcess | None = None,
    ) -> None:
        """Take the signals and make the run directory; ``start`` does the rest.

        ``announce`` prints lines common to all launchers of the job, unless another one prints them.

        Raises:
            ConfigError: there is no place for the run directory.
        """
        self.line, self.log, self.log_dir, self.say = line, log, log_dir, say
        options = line.options
        self._orphans = process_tree.Orphans()
        self.children: list[Callable[[], Collection[int]]] = []
        """Sources of the PIDs of processes that the launcher itself has started and still needs."""
        become_subreaper()
        self.reactor = Reactor()
        self.take: Callable[[Event], object] = lambda _event: None
        """Takes events; set while there is an agent."""
        self.on_signals: Callable[[], object] = lambda: None
        """Called when there may be requests to stop; set while there is an agent."""
        self.infra_rank = schedulers.rank(
            os.environ, given=line.node_rank, min_nodes=line.min_nodes, max_nodes=line.max_nodes
        )
        self.telemetry = Telemetry(
            options,
            run_id=line.run_id,
            node=socket.gethostname(),
            reactor=self.reactor,
            say=say,
        )
        self.orphan_watch = OrphanWatch(
            self.reactor,
            lambda text: self.put(Abandoned(text=text)),
            inherited_streams(line.namespace, ranks),
        )
        self.signals = SignalWatch(self.reactor)
        forwarded = (*options.forward_signals, *line.save_signals)
        self.signals.install(line.signals, forwarded=forwarded, keep_ignored_hangup=line.signals_are_default)
        self.reactor.watch(self.signals.fileno(), self._woken, Priority.SIGNAL)
        self.run_dir = RunDirectory(say)
        self.forking = self._make_forking(server, announce)
        self._make_monitors(ranks)
        self.status = JobStatus(line, log_dir=log_dir, monitors=self.monitors)
        log.follow(self._recorded)
        self.control = ControlSocket(
            os.path.join(self.run_dir.path, "launcher.sock"),
            self.reactor,
            say=say,
            on_request=self.put,
            on_order=self.monitors.pause_or_resume,
            on_question=self.status.facts,
        )
        self.over: LauncherExit | None = None
        """End of the launcher's part in the job; None while it runs, or if the launcher itself has failed."""
        self.workers: dict[int, Worker] = {}
        """Ranks of the running cycle, or of the last one, by local rank; more may be added while they start."""
        self._make_keeper(ranks, announce)
        self.health = self._make_health_check()
        self.children += [each.pids for each in (self.telemetry, self.forking, self.health) if each is not None]
        self.run_dir.sockets = [*self.monitors.slots, self.control, self.keeper]

    def _make_forking(self, server: ServerProcess | None, announce: Callable[[str], None]) -> ForkingSpawner | None:
        """Return the forking spawner; None if ranks are never forked."""
        options = self.line.options
        if options.preload is None:
            if server is not None:
                server.end(set)  # started by the early parse of the command line
            return None
        return ForkingSpawner(
            server=server,
            preload=options.preload,
            reactor=self.reactor,
            log=self.log,
            say=self.say,
            announce=announce,
            check_stop=self.signals.check,
            known_children=self.known_children,
            environment=self.line.rank_environment,
        )

    def _make_monitors(self, ranks: int) -> None:
        options = self.line.options
        monitor_options = MonitorOptions(
            config=options,
            log_dir=self.log_dir,
            run_id=self.line.run_id,
            observe_only=options.observe_only,
            asks_first=options.restart_policy == MIN_HEALTHY and not options.observe_only,
        )
        slots = [
            MonitorSlot(
                local_rank,
                path=os.path.join(self.run_dir.path, f"monitor-{local_rank}.sock"),
                options=monitor_options,
                reactor=self.reactor,
                log=self.log,
                say=self.say,
                on_event=self.put,
            )
            for local_rank in range(ranks)
        ]
        self.monitors = Monitors(slots, self.reactor, log=self.log, say=self.say, on_check=self._each_second)

    def _make_keeper(self, ranks: int, announce: Callable[[str], None]) -> None:
        options, secret = self.line.options, None
        with contextlib.suppress(ConfigError):  # raised again where nodes meet; a job of one node needs no secret
            secret = read_secret(os.environ)
        xxhash = digests.find_module()
        self.files = SnapshotFiles(
            options.memory_checkpoint_dir,
            self.reactor,
            timeout_s=options.memory_checkpoint_write_timeout,
            ranks=0 if xxhash is None else ranks,
            say=self.say,
            say_everywhere=announce,
        )
        self.keeper = Keeper(
            self.reactor,
            os.path.join(self.run_dir.path, "keeper.sock"),
            xxhash=xxhash,
            files=self.files,
            secret=secret,
            copies_bytes_per_s=options.memory_checkpoint_bandwidth * 10**6,
            say=self.say,
            on_event=self.put,
        )

    def _make_health_check(self) -> HealthCheck | None:
        options = self.line.options
        if options.segment_health_check_dir is not None and not segment_file(os.environ):
            self.say("--ft-segment-health-check-dir has no effect outside a job of Slurm")
        command = command_of(options)
        if command is None:
            if options.node_health_check_interval is not None:
                self.say(
                    "--ft-node-health-check-interval has no effect without a health check, "
                    "such as --ft-node-health-command"
                )
            return None
        return HealthCheck(
            command,
            timeout_s=options.node_health_timeout,
            reactor=self.reactor,
            known_children=self.known_children,
            directories=job_directories(options, self.log_dir),
        )

    def start(self, command: Sequence[str]) -> None:
        """Listen for monitors and ranks, and start to import what the ranks' ``command`` imports.

        Raises:
            FaultToleranceError: a socket or process can't be made.
        """
        try:
            self.control.start()
            for slot in self.monitors.slots:  # before the ranks, whose groups they end if the launcher is killed
                slot.start()
            self.keeper.listen()
            if self.forking is not None:
                self.forking.prepare(command, why_fresh(command))
        except OSError as error:
            raise FaultToleranceError(f"the rank monitors can't be started: {error}") from error

    def close(self) -> None:
        """Stop the monitors and remove what was made; what is left is reported, and changes no exit code."""
        steps: list[Callable[[], object]] = [
            self.telemetry.close,
            *([] if self.health is None else [self.health.close]),
            *([] if self.forking is None else [self.forking.close]),
            self.keeper.close,
            self.monitors.stop,
            self.control.close,
            self.run_dir.close,
            lambda: self._orphans.reap(lambda _pid: False),
            self.signals.close,
            self.orphan_watch.close,
            self.reactor.close,
        ]
        failed: list[OSError] = []
        for step in steps:
            try:
                step()
            except OSError as error:
                failed.append(error)
        if failed and os.path.exists(self.run_dir.path):
            what, where = launcher_lines.in_one_line(failed[0]), self.run_dir.path
            self.say(f"cleanup was incomplete ({what}): {where} may be left behind")

    def _woken(self) -> None:
        self.signals.drain()
        while self.signals.to_forward:
            self._forward(self.signals.to_forward.popleft())
        self.on_signals()  # a forwarded one may have become a request to stop
        for slot in self.monitors.slots:
            slot.replace_if_stopped()
        self._reap_orphans()

    def _forward(self, number: signal.Signals) -> None:
        """Forward a signal to the ranks that handle it; it would only kill the others.

        A signal of a scheduler's time limit is a request to stop if no rank handles it.
        """
        alive = [worker for worker in self.workers.values() if not worker.poll_end()]
        unready = [worker.local_rank for worker in alive if would_end_by(worker.pid, number)]
        passed_on = [worker for worker in alive if worker.local_rank not in unready]
        for worker in passed_on:
            send_signal(worker.pidfd, number)  # not counted as a signal of ours: it doesn't explain a rank's exit
        if number in self.line.save_signals and not passed_on:
            self.say(f"{number.name} treated as a request to stop: no rank has a handler for it")
            self.signals.note(signal.SIGTERM, time.monotonic())
            return
        ranks = [worker.local_rank for worker in passed_on]
        self.say(launcher_lines.forwarded(number.name, ranks=ranks, unready=unready))
        self.log.write(SignalForwarded(signal=number.name, local_ranks=tuple(ranks), unready=tuple(unready)))

    def _recorded(self, record: Record, at_ns: int) -> None:
        self.status.hear(record, at_ns)
        self.telemetry.hear(record, is_spokesman=self.status.is_spokesman)

    def put(self, event: Event) -> None:
        """Have the agent take an event, if there is one."""
        self.take(event)

    def known_children(self) -> set[int]:
        """Return the PIDs of processes that are no leftovers of a rank."""
        ranks = {worker.pid for worker in self.workers.values() if not worker.reaped}
        return ranks.union(helper_process.unreaped, *(source() for source in self.children))

    def _each_second(self) -> None:
        self.orphan_watch.check()
        self.run_dir.mend()
        self.telemetry.look(self.status.readings)
        if self._orphans.are_awaited:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        known = self.known_children()
        self._orphans.reap(lambda pid: pid in known)


def reference_variables(cycle: int, now_s: float, waiting_s: float, infra_rank: int | None) -> dict[str, str]:
    """Return the variables that Megatron-LM reads: cycle, wall-clock times, and the scheduler's number of this node.

    ``waiting_s``: seconds since this node began to wait for the cycle. The first cycle has no such time: it is the
    scheduler's.
    """
    values = {
        "NVRX_CYCLE": str(cycle),
        "NVRX_LAUNCH_TIME": repr(now_s),
        "NVRX_MEMBERSHIP": "active",
    }
    if cycle:
        values["NVRX_CYCLE_START_TIME"] = repr(now_s - waiting_s)
    return values if infra_rank is None else {**values, "NVRX_INFRA_RANK": str(infra_rank)}


def checkpointed(path: str | None) -> int | None:
    """Return the iteration of the last checkpoint; None if the file is missing, or holds no number."""
    if path is None:
        return None

    def read() -> int | None:
        with open(path) as file:
            return int(file.read(64))

    try:
        return bounded_call(read, None)
    except (OSError, ValueError):
        return None
