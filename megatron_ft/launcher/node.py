"""What the launcher of one node needs for the whole job, opened at its start and closed at its end."""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence

from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.messages.control import Pause, Resume
from megatron_ft.core.printable import printable
from megatron_ft.core.rate_limiter import Moderation
from megatron_ft.core.records import launcher as records
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.linux.prctl import become_subreaper
from megatron_ft.launcher import reference_names
from megatron_ft.launcher.base import lines
from megatron_ft.launcher.base.event_loop import Priority, Reactor
from megatron_ft.launcher.base.run_directory import RunDirectory
from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.base.ties import Ties
from megatron_ft.launcher.command_line import CommandLine
from megatron_ft.launcher.control import ControlSocket
from megatron_ft.launcher.cycle.starting import RankStarter
from megatron_ft.launcher.cycle.variables import RankVariables, shared_environment
from megatron_ft.launcher.glance import shares_output
from megatron_ft.launcher.job_status import JobStatus
from megatron_ft.launcher.monitors.monitors import Monitors
from megatron_ft.launcher.processes import numa, process_tree, ready_checks
from megatron_ft.launcher.processes.children import Children
from megatron_ft.launcher.processes.crash_evidence import CrashEvidence
from megatron_ft.launcher.processes.device_memory import DeviceMemory
from megatron_ft.launcher.processes.health_command import HealthCheck
from megatron_ft.launcher.processes.ranks import Ranks
from megatron_ft.launcher.processes.termination import Termination
from megatron_ft.launcher.processes.worker import FreshInterpreterSpawner
from megatron_ft.launcher.spawn.fork_server import ServerProcess
from megatron_ft.launcher.spawn.forking import ForkingSpawner
from megatron_ft.launcher.stop_requests import StopRequests

__all__ = ["Node", "say", "sayer"]


def say(text: str) -> None:
    """Print one line for the user, in which nothing of what came from elsewhere can act on a terminal."""
    try:
        print(f"{lines.PREFIX}{printable(text)}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # a terminal that is gone must not end the job; the event log has it


def sayer(line: CommandLine) -> Callable[[str], None]:
    """``say``; where the job may have several nodes, with the time and this node's name, as their output is mixed."""
    if line.max_nodes == 1:
        return say
    host = socket.gethostname()
    return lambda text: say(lines.of_node(text, host, time.localtime()))


class Node:
    """The services of this node's launcher."""

    def __init__(
        self, line: CommandLine, *, ranks: int, log: EventLog, log_dir: str | None, server: ServerProcess | None = None
    ) -> None:
        """Take the signals and make the run directory; ``start`` does the rest.

        Raises:
            ConfigError: there is no place for the run directory.
        """
        self.log = log
        self.log_dir = log_dir
        """None: no logs are written."""
        self.line = line
        self.say = sayer(line)
        self._orphans = process_tree.Orphans()
        self._pause_lines = Moderation()
        become_subreaper()
        self.reactor = Reactor()
        self.ties = Ties(self.reactor)
        self.signals = SignalWatch(
            line.signals,
            forwarded=(*line.options.forward_signals, *line.save_signals),
            keep_ignored_hangup=line.signals_are_default,
        )
        self.signals.install()
        self.stop = StopRequests(self.signals, self.reactor, log=log, say=self.say, timeout_s=line.term_timeout)
        self.ranks = Ranks(self.signals, save_signals=line.save_signals, log=log, say=self.say)
        self.children = Children()
        self.children.add(self.ranks.pids)
        self.reactor.watch(self.signals.fileno(), self._woken, Priority.SIGNAL)
        self.run_dir = RunDirectory(self.say)
        binds = numa.variable() is not None  # through a command, which starts interpreters
        self.forking = None if line.options.preload is None or binds else self._make_forking(server)
        if self.forking is not None:
            self.children.add(self.forking.pids)
        elif server is not None:
            server.end(set)  # it was started at a first glance at the command line
        self.ending = Termination(
            self.reactor, known_children=self.children.pids, in_a_hurry=self.signals.ask_to_kill, say=self.say
        )
        self.crash_evidence = CrashEvidence(log, log_dir, self.say)
        self.device_memory = DeviceMemory(self.reactor, log=log, say=self.say)
        self.cycle_info = reference_names.cycle_info(line, os.environ, log)
        """None: ``--ft-cycle-info-dir`` isn't given."""
        command = ready_checks.command(line.options, line.node_health_command, log_dir=log_dir, ranks=ranks)
        self.health = None if command is None else self._make_health_check(command)
        if self.health is not None:
            self.children.add(self.health.pids)
        self.control = ControlSocket(os.path.join(self.run_dir.path, "launcher.sock"), self.reactor, say=self.say)
        self.control.on_order = self._ordered
        self.monitors = Monitors(
            count=ranks,
            config=line.options.config.to_dict(),
            run_dir=self.run_dir.path,
            log_dir=log_dir,
            run_id=line.run_id,
            reactor=self.reactor,
            log=log,
            say=self.say,
            observe_only=line.options.observe_only,
            log_max_bytes=line.options.log_max_bytes,
        )
        self.children.add(self.monitors.pids)
        self.run_dir.add(self.control)
        self.run_dir.add(self.monitors)
        variables = RankVariables(line, monitors=self.monitors, control=self.control, cycle_info=self.cycle_info)
        self.raised_timeouts = variables.raised_timeouts
        self.starter = RankStarter(
            line=line,
            reactor=self.reactor,
            stop=self.stop,
            say=self.say,
            run_dir=self.run_dir,
            variables=variables,
            forking=self.forking,
            spawner=self.forking or FreshInterpreterSpawner(),
            termination=self.ending,
        )
        self.status = JobStatus(line, log_dir=log_dir, monitors=self.monitors)
        self.control.on_question = self.status.facts
        self.monitors.on_check = self._each_second

    def _make_forking(self, server: ServerProcess | None) -> ForkingSpawner:
        options, namespace = self.line.options, self.line.namespace
        assert options.preload is not None
        return ForkingSpawner(
            fresh=FreshInterpreterSpawner(),
            server=server,
            preload=options.preload,
            timeout_s=options.preload_timeout,
            shares_output=shares_output(namespace.redirects, namespace.tee, namespace.logs_specs),
            reactor=self.reactor,
            log=self.log,
            say=self.say,
            check_stop=self.stop.check,
            known_children=self.children.pids,
            environment=functools.partial(shared_environment, self.line),
        )

    def _make_health_check(self, command: str) -> HealthCheck:
        return HealthCheck(
            command,
            timeout_s=self.line.options.node_health_timeout,
            reactor=self.reactor,
            known_children=self.children.pids,
        )

    def start(self, command: Sequence[str]) -> None:
        """Listen for monitors and ranks, and start to import what the ranks' ``command`` may need.

        Raises:
            FaultToleranceError: that can't be done.
        """
        try:
            self.control.start()
            self.monitors.listen()
            self.monitors.start()
            if self.forking is not None:
                self.forking.prepare(command)
        except OSError as error:
            raise FaultToleranceError(f"the rank monitors can't be started: {error}") from error

    def close(self) -> None:
        """Stop the monitors and remove what was made; a failure is reported, and doesn't change the exit code."""
        steps: list[Callable[[], object]] = [] if self.cycle_info is None else [self.cycle_info.ended]
        steps += [] if self.health is None else [self.health.close]
        steps += [] if self.forking is None else [self.forking.close]
        steps += [self.monitors.stop, self.control.close, self.run_dir.remove, self.run_dir.release]
        steps += [lambda: self._orphans.reap(lambda _pid: False), self.signals.close, self.ties.close]
        failed: list[OSError] = []
        for step in [*steps, self.reactor.close]:
            try:
                step()
            except OSError as error:
                failed.append(error)
        if failed:
            self.say(lines.left_something(failed[0], self.run_dir.path))

    def _ordered(self, order: Pause | Resume, pid: int) -> bool:
        """``megatron-ft pause`` and ``resume``."""
        since_ns = self.monitors.paused.since_ns
        is_pause = isinstance(order, Pause)
        changed = self.monitors.pause() if is_pause else self.monitors.resume()
        if not changed:
            return False
        pause_s = 0.0 if since_ns is None else (time.monotonic_ns() - since_ns) / 1e9
        line = lines.paused(pid) if is_pause else lines.resumed(pid, pause_s)
        line_now = self._pause_lines.admit(line, time.monotonic())
        if line_now is not None:
            self.say(line_now)
        self.log.write(records.Paused(by=pid) if is_pause else records.Resumed(by=pid))
        return True

    def _woken(self) -> None:
        self.signals.drain()
        self.ranks.forward_signals()
        self.signals.report()  # one of those forwarded may have become a request to stop
        self.monitors.check_states()
        if self.forking is not None:
            self.forking.check_states()
        self._reap_orphans()

    def _each_second(self) -> None:
        self.ties.check()
        self.run_dir.mend()
        if self._orphans.are_awaited:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        known = self.children.pids()
        self._orphans.reap(lambda pid: pid in known)
