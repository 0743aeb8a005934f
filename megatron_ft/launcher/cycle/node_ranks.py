"""This node's ranks of the current cycle: readings and actions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import ProcessFailure

from megatron_ft.config.launcher_options import OFF
from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.launcher.cycle import reference_names
from megatron_ft.launcher.cycle.node import LauncherNode
from megatron_ft.launcher.processes.crash_evidence import CrashEvidence, read_last_words
from megatron_ft.launcher.processes.device_memory_wait import DeviceMemoryWait
from megatron_ft.launcher.processes.health_command import FINISHED_FLAG
from megatron_ft.launcher.processes.rank_logs import CycleLogs
from megatron_ft.launcher.processes.termination import Termination
from megatron_ft.launcher.processes.worker import Spawner, Worker
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.torch_compat.torch_agent import WorkerContext
from megatron_ft.link import process_tree
from megatron_ft.link.base.layout import CollectiveCounts
from megatron_ft.link.base.rank_variables import WATCH_VARIABLE
from megatron_ft.link.facts.launcher import Cause, RankExited
from megatron_ft.link.file_queue import bounded_call
from megatron_ft.link.linux.proc import run_delays_ns
from megatron_ft.link.linux.processes import ProcessStat
from megatron_ft.link.messages.job_facts import RankReading
from megatron_ft.link.messages.monitor_messages import Release

T = TypeVar("T")


class NodeRanks:
    """The ranks of this node."""

    def __init__(self, node: LauncherNode) -> None:
        self._node = node
        self._monitors = node.monitors
        self._spawner = Spawner(node.forking)
        self._termination = Termination(
            node.reactor, known_children=node.children.pids, in_a_hurry=node.signals.is_in_a_hurry, say=node.say
        )
        self._device_memory = DeviceMemoryWait(node.reactor, log=node.log, say=node.say)
        self._crash_evidence = CrashEvidence(node.log, node.log_dir, node.say)
        self._workers: dict[int, Worker] = {}
        """Ranks of the last cycle, by local rank."""
        self._error_files: dict[int, str] = {}
        self._stderrs: dict[int, str] = {}
        """Files of standard error, for ranks that don't use the launcher's."""

    # -- what is read -----------------------------------------------------------------------------------------

    def readings(self, cycle: int) -> events.Readings:
        """Return the state of the ranks: each value is read on its first access, and not again."""
        monitors = self._monitors
        return events.Readings(
            boards=_Lazy(lambda local_rank: monitors[local_rank].reading(cycle).snapshot),
            words=_Lazy(lambda local_rank: self._words(local_rank, cycle)),
            stopped=_Lazy(lambda local_rank: process_tree.is_stopped(self._workers[local_rank].pid)),
            run_delays_ns=_Lazy(lambda local_rank: run_delays_ns(self._workers[local_rank].pid)),
            checkpointed=lambda: reference_names.checkpointed(self._node.line.options.checkpoint_iteration_file),
            is_finished=lambda: bounded_call(lambda: os.path.exists(os.environ.get(FINISHED_FLAG, "")), False),
            collectives=_Lazy(lambda local_rank: _collectives(monitors[local_rank].reading(cycle))),
        )

    def _words(self, local_rank: int, cycle: int) -> CrashOutput:
        reported = self._monitors[local_rank].last_words(cycle)
        return read_last_words(reported, self._error_files.get(local_rank, ""), self._stderrs.get(local_rank, ""))

    def failures(self, failed: Sequence[RankExited], cause: Cause | None) -> dict[int, ProcessFailure]:
        """Return torch's table of failures, by global rank; torch takes the earliest one for the root cause."""
        first = None if cause is None else cause.rank
        failures: dict[int, ProcessFailure] = {}
        earliest = 0
        for rank_exit in sorted(failed, key=lambda rank_exit: (rank_exit.rank != first, rank_exit.at_ns)):
            failure = _process_failure(rank_exit, self._error_files.get(rank_exit.local_rank, ""))
            earliest = earliest or failure.timestamp
            failure.timestamp = max(earliest, failure.timestamp)
            failures[rank_exit.rank] = failure
        return failures

    def poll_ends(self) -> None:
        """Note the ranks that have ended."""
        for worker in self._workers.values():
            worker.poll_end()

    # -- how they start ---------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop the ranks of the last cycle, before others are created."""
        self._workers = {}

    def make(
        self,
        *,
        check: Callable[[], None],
        cycle: int,
        waiting_s: float,
        restarts_left: int,
        envs: dict[int, dict[str, str]],
        **given: Any,
    ) -> WorkerContext:
        """Return the ranks of a cycle, not started, once the device memory of the last ones is free.

        ``check`` is called during the wait; ``waiting_s``: seconds for which this node has waited for the cycle;
        ``given``: torch's arguments of ``start_processes``, and what to call with each rank when it starts and exits.

        Raises:
            any exception of ``check``.
        """
        self._device_memory.wait(check)
        node, line = self._node, self._node.line
        node.run_dir.mend()
        infra_rank = reference_names.infra_rank(line, os.environ)
        ours = reference_names.variables(cycle, time.time(), waiting_s, infra_rank)
        ours |= {"FT_LAUNCHER_IPC_SOCKET": node.control.path, "FT_CYCLE": str(cycle), **node.keeper.variables()}
        ours[WATCH_VARIABLE] = "off" if line.options.watch_collectives.how == OFF else "on"
        for local_rank, env in envs.items():
            env.update(ours)
            env["FT_RANK_MONITOR_IPC_SOCKET"] = self._monitors[local_rank].socket_path
        if node.forking is not None:
            # nodes that join or leave restart ranks, too
            node.forking.expects_restart = restarts_left > 0 or line.max_nodes > 1
        given.pop("start_method", None)
        specs = CycleLogs(
            given.pop("logs_specs"),
            run_dir=node.run_dir.path,
            say=node.say,
            blocking=node.signals.blocking,
            prefix=line.options.per_cycle_applog_prefix,
        )
        context = WorkerContext(
            spawn=self._spawner.spawn,
            environment=line.rank_environment(),
            reactor=node.reactor,
            end=self._termination.end,
            envs=envs,
            logs_specs=specs,
            **given,
        )
        self._workers = context.workers
        node.running.follow(context.workers)
        self._error_files, self._stderrs = dict(context.error_files), dict(context.stderrs)
        return context

    def release(self) -> None:
        """Let forked ranks go on, once the start of their cycle was reported."""
        if self._node.forking is not None:
            self._node.forking.release()

    # -- what is done to them ---------------------------------------------------------------------------------

    def state_written(self, value: int) -> None:
        """Tell the ranks what became of the learned timeouts: a STATE_ value of the board."""
        for local_rank in self._workers:
            self._monitors[local_rank].state_written(value)

    def act(self, effect: events.ToRanks) -> None:
        """Carry out an effect of the launcher's machine."""
        match effect:
            case events.OrderMonitor(local_rank, order):
                self._monitors[local_rank].order(order)
            case Release():
                self._monitors.release(effect)
            case events.SignalRanks(local_ranks, number, whole_group):
                workers = [self._workers[local_rank] for local_rank in local_ranks]
                self._termination.ask(workers, number, whole_group=whole_group)
            case events.KeepEvidence(ended):
                words, stderr = self._words(ended.local_rank, ended.cycle), self._stderrs.get(ended.local_rank, "")
                snapshot = self._monitors[ended.local_rank].reading(ended.cycle).snapshot
                self._crash_evidence.keep(ended, words, snapshot=snapshot, stderr=stderr)

    def terminate(self, work: events.TerminateRanks, end_rest: Callable[[], None]) -> Sequence[ProcessStat]:
        """Terminate the ranks as ordered, then call ``end_rest``. Return processes that couldn't be ended."""
        workers = list(self._workers.values())
        if work.way is events.TerminationMode.KILLED:
            self._termination.kill(workers)
            if work.leftover_grace_s is not None:
                self._termination.clear(workers, leftover_grace_s=work.leftover_grace_s, ask=False)
        elif work.way is events.TerminationMode.FINISHED:
            self._termination.clear(workers, quietly=False)
        end_rest()
        return self._termination.still_there(workers)

    def let_go(self) -> None:
        """Give up what belonged to ranks that have ended."""
        self._device_memory.begin(self._termination.take_let_go())


def _collectives(reading: RankReading) -> CollectiveCounts | None:
    return reading.collectives if reading.snapshot is None else reading.snapshot.collectives


class _Lazy(dict[int, T]):
    """Reads each value on its first access."""

    def __init__(self, read: Callable[[int], T]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, key: int) -> T:
        value = self[key] = self._read(key)
        return value


def _process_failure(rank_exit: RankExited, error_file: str) -> ProcessFailure:
    try:
        failure = bounded_call(lambda: _failure_of(rank_exit, error_file), None)
    except Exception:  # noqa: BLE001 - torch raises whatever a half-written file makes it raise
        failure = None
    failure = failure or _failure_of(rank_exit, "")
    if rank_exit.exitcode == 0:
        failure.message = "exited with 0 after its monitor had found it hung"
    return failure


def _failure_of(rank_exit: RankExited, error_file: str) -> ProcessFailure:
    failure = ProcessFailure(
        local_rank=rank_exit.local_rank,
        pid=rank_exit.pid or 0,
        exitcode=rank_exit.exitcode,
        error_file=error_file,
    )
    if not failure.timestamp or not os.path.isfile(error_file):
        failure.timestamp = round(time.time() - (time.monotonic_ns() - rank_exit.at_ns) / 1e9)
    return failure
