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
from megatron_ft.core.run_ahead import WATCH_VARIABLE
from megatron_ft.core.timeouts.raised import RaisedTimeouts
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.linux.prctl import become_subreaper
from megatron_ft.launcher import reference_names
from megatron_ft.launcher.base import directories, leftovers, lines
from megatron_ft.launcher.base.event_loop import Priority, Reactor
from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.base.ties import Ties
from megatron_ft.launcher.command_line import CommandLine
from megatron_ft.launcher.control import ControlSocket
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
from megatron_ft.launcher.processes.worker import FreshInterpreterSpawner, Spawner
from megatron_ft.launcher.spawn.fork_server import ServerProcess
from megatron_ft.launcher.spawn.forking import ForkingSpawner
from megatron_ft.launcher.spawn.rank_environment import rank_environment
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
        self._told_run_dir = False
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
        self.run_dir = directories.make_run_directory()
        self._claim = leftovers.claim(self.run_dir)
        binds = numa.variable() is not None  # through a command, which starts interpreters
        self.forking = None if line.options.preload is None or binds else self._make_forking(server)
        if self.forking is not None:
            self.children.add(self.forking.pids)
        elif server is not None:
            server.end(set)  # it was started at a first glance at the command line
        self.spawner: Spawner = self.forking or FreshInterpreterSpawner()
        self.ending = Termination(
            self.reactor, known_children=self.children.pids, in_a_hurry=self.signals.ask_to_kill, say=self.say
        )
        self.crash_evidence = CrashEvidence(log, log_dir, self.say)
        self.device_memory = DeviceMemory(self.reactor, log=log, say=self.say)
        self._infra_rank = reference_names.infra_rank(line, os.environ)
        self.cycle_info = reference_names.cycle_info(line, os.environ, log)
        """None: ``--ft-cycle-info-dir`` isn't given."""
        command = ready_checks.command(line.options, line.node_health_command, log_dir=log_dir, ranks=ranks)
        self.health = None if command is None else self._make_health_check(command)
        if self.health is not None:
            self.children.add(self.health.pids)
        self.control = ControlSocket(os.path.join(self.run_dir, "launcher.sock"), self.reactor, say=self.say)
        self.control.on_order = self._ordered
        self.raised_timeouts = RaisedTimeouts()
        self.monitors = Monitors(
            count=ranks,
            config=line.options.config.to_dict(),
            run_dir=self.run_dir,
            log_dir=log_dir,
            run_id=line.run_id,
            reactor=self.reactor,
            log=log,
            say=self.say,
            observe_only=line.options.observe_only,
            log_max_bytes=line.options.log_max_bytes,
        )
        self.children.add(self.monitors.pids)
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
            environment=self.rank_environment,
        )

    def rank_environment(self) -> dict[str, str]:
        """The environment that all ranks of this node share; torch adds what differs per rank."""
        options = self.line.options
        watches = options.watch_collectives != "off"
        return rank_environment(os.environ, reference_names=options.reference_names == "on", watches=watches)

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

    def mend_run_dir(self) -> None:
        """Recreate sockets that were deleted: ranks that are still to connect would find no monitor."""
        if not (self.control.is_lost() or self.monitors.are_lost()):
            self._told_run_dir = False
            return
        if not self._told_run_dir:
            self.say(lines.run_dir_removed(self.run_dir))
        try:
            directories.remake_run_directory(self.run_dir)
            self._claim_anew()
            self.control.listen_again()
            self.monitors.listen_again()
        except OSError as error:
            if not self._told_run_dir:
                self.say(lines.run_dir_lost(str(error)))
        self._told_run_dir = True

    def _claim_anew(self) -> None:
        before, self._claim = self._claim, leftovers.claim(self.run_dir)
        if before is not None:
            os.close(before)

    def ranks_start(self, envs: dict[int, dict[str, str]], *, cycle: int, restarts_left: int) -> None:
        """Complete the environments (by local rank) of the ranks that are about to start.

        Nodes that join or leave restart ranks, too, so a job of several nodes always expects a restart.
        """
        self.mend_run_dir()
        now = time.time()
        for local_rank, env in envs.items():
            env.update(self.environment(local_rank, cycle))
            env.update(reference_names.variables(cycle, now, self._infra_rank))
            if self.cycle_info is not None:
                env["NVRX_CURRENT_CYCLE_INFO"] = self.cycle_info.current
        if self.cycle_info is not None and envs[0].get("GROUP_RANK") == "0":
            self.cycle_info.begun(cycle, nodes=int(envs[0]["GROUP_WORLD_SIZE"]))
        if self.forking is not None:
            self.forking.expects_restart = restarts_left > 0 or self.line.max_nodes > 1

    def checkpointed(self) -> int | None:
        """The iteration of the last checkpoint, where a file holds it."""
        return reference_names.checkpointed(self.line.options.checkpoint_iteration_file)

    def environment(self, local_rank: int, cycle: int) -> dict[str, str]:
        """What a rank finds in its environment beyond torchrun's."""
        return {
            "FT_RANK_MONITOR_IPC_SOCKET": self.monitors.socket_path(local_rank),
            "FT_LAUNCHER_IPC_SOCKET": self.control.path,
            "FT_CYCLE": str(cycle),
            WATCH_VARIABLE: "off" if self.line.options.watch_collectives == "off" else "on",
            **self.raised_timeouts.environment(cycle),
        }

    def close(self) -> None:
        """Stop the monitors and remove what was made; a failure is reported, and doesn't change the exit code."""
        steps: list[Callable[[], object]] = [] if self.cycle_info is None else [self.cycle_info.ended]
        steps += [] if self.health is None else [self.health.close]
        steps += [] if self.forking is None else [self.forking.close]
        steps += [self.monitors.stop, self.control.close, lambda: directories.remove_run_directory(self.run_dir)]
        steps += [] if (claim := self._claim) is None else [functools.partial(os.close, claim)]
        steps += [lambda: self._orphans.reap(lambda _pid: False), self.signals.close, self.ties.close]
        failed: list[OSError] = []
        for step in [*steps, self.reactor.close]:
            try:
                step()
            except OSError as error:
                failed.append(error)
        if failed:
            self.say(lines.left_something(failed[0], self.run_dir))

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
        self.mend_run_dir()
        if self._orphans.are_awaited:
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        known = self.children.pids()
        self._orphans.reap(lambda pid: pid in known)
