"""torch's elastic agent around the launcher's machine: turns occurrences into events, and carries out effects.

`launcher.rules` makes the decisions. Effects that take time run on torch's loop, one after the other; all others at
once, wherever the launcher is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from megatron_ft.config.launcher_options import OFF
from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.errors import FaultToleranceError
from megatron_ft.job.coordination import Coordination
from megatron_ft.job.rules.messages import GOODBYE_S, Goodbye, NodeMessage, Tell
from megatron_ft.job.rules.restart_policy import rotated
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.cycle.node import LauncherNode, checkpointed, reference_variables
from megatron_ft.launcher.cycle.parts import launcher_parts
from megatron_ft.launcher.processes.crash_evidence import keep_evidence, kernel_lines_about, read_last_words
from megatron_ft.launcher.processes.device_memory_wait import DeviceMemoryWait
from megatron_ft.launcher.processes.health_command import FINISHED_FLAG
from megatron_ft.launcher.processes.rank_logs import CycleLogs
from megatron_ft.launcher.processes.worker import Termination, Worker, spawn
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.rules.agent import Agent, AgentPhase, report_unlisted
from megatron_ft.launcher.rules.turn import Options
from megatron_ft.launcher.torch_compat import private_names
from megatron_ft.launcher.torch_compat.torch_agent import TorchAgent, WorkerContext
from megatron_ft.learning.launcher.part import TellStateWritten
from megatron_ft.learning.state_file import carry_out
from megatron_ft.learning.timeouts import StateFile
from megatron_ft.link import process_tree
from megatron_ft.link.base.mailbox import Mailbox
from megatron_ft.link.base.rank_variables import WATCH_VARIABLE
from megatron_ft.link.facts.launcher import Cause, CauseKind, RankExited, RankStarted
from megatron_ft.link.file_queue import FileQueue, bounded_call
from megatron_ft.link.linux.proc import process_facts, run_delays_ns
from megatron_ft.link.log import LAUNCHER
from megatron_ft.link.messages.monitor_messages import Release
from megatron_ft.link.reactor import Priority, Timer
from megatron_ft.memory.launcher.snapshots_on_node import ToKeeper
from megatron_ft.memory.rules.snapshots import Kept, Restore, StockTaken

T = TypeVar("T")
_MET = ("workers", "store", "group_rank", "group_world_size", "master_addr", "master_port")
"""Fields that torch sets in a group of workers where nodes meet."""
LAST_WRITE_S = 2.0
"""Seconds the launcher's exit waits for a write of learned timeouts."""


class JobOverError(FaultToleranceError):
    """Raised when this launcher's part in the job is over, and its lines about that are printed."""


class _CycleOverError(FaultToleranceError):
    """Raised when the next cycle isn't wanted any more, to give up its preparation."""


class FaultTolerantAgent(TorchAgent):
    """One node's agent. ``launcher.over`` is how its part in the job has ended, before ``run`` returns or raises."""

    def __init__(
        self,
        *,
        launcher: LauncherNode,
        coordination: Coordination,
        **torch_arguments: Any,
    ) -> None:
        super().__init__(**torch_arguments)
        self.grace_s = launcher.line.options.workers_stop_timeout
        report_unlisted(LAUNCHER.debug)
        self._launcher, self._coordination = launcher, coordination
        self._monitors, self._say = launcher.monitors, launcher.say
        self._termination = Termination(
            launcher.reactor,
            known_children=launcher.known_children,
            in_a_hurry=lambda: launcher.signals.is_in_a_hurry,
            say=launcher.say,
        )
        self._device_memory = DeviceMemoryWait(launcher.reactor, log=launcher.log, say=launcher.say)
        self._error_files: Mapping[int, str] = {}
        self._stderrs: Mapping[int, str] = {}
        """Files of standard error, for ranks that don't use the launcher's."""
        instance = coordination.member.identity.instance
        options = machine_options(launcher.line, checks_health=launcher.health is not None, instance=instance)
        parts = launcher_parts(options, launcher.monitors.paused, launcher.files.found)
        self._machine = Agent(options, parts, coordination.orders)
        self._file_calls = FileQueue()
        """Reads and writes the file of learned timeouts: a stuck file server must not stop the launcher."""
        self._starting: events.StartRanks
        self._mailbox: Mailbox[events.Effect] = Mailbox(self._act)
        self._work: events.Work | None = None
        self._timer: Timer | None = None
        self._alarm_ns: int | None = None
        """Time of the timer; None without one."""
        launcher.status.follow(self._machine)
        launcher.take, launcher.on_signals = self._hear, self._take_signals

    # -- torch's loop -------------------------------------------------------------------------------------

    def run_job(self) -> RunResult:
        """Serve events until the machine says that this launcher's part is over."""
        try:
            self._take_signals()
            self._hear(events.Tick())
            while (over := self._launcher.over) is None:
                work, self._work = self._work, None
                match work:
                    case events.CheckHealth():
                        self._check_health()
                    case events.StartRanks():
                        self._start_ranks(work)
                    case events.TerminateRanks():
                        self._terminate(work)
                    case None:
                        self._launcher.reactor.run_once(None)
        except BaseException as error:
            # whatever it is: tell the other nodes at once, and why
            self._launcher.take, self._launcher.on_signals = lambda _event: None, lambda: None
            if self._coordination.orders.left is None:
                goodbye = Goodbye(f"its launcher failed: {launcher_lines.in_one_line(error)}", failed=True)
                self._coordination.tell(goodbye)
                over_s = time.monotonic() + GOODBYE_S
                self._launcher.reactor.run_until(lambda: self._coordination.orders.left is not None, deadline_s=over_s)
            raise
        finally:
            self._file_calls.finish(LAST_WRITE_S)
        return self._result(over)

    def _result(self, over: events.LauncherExit) -> RunResult:
        ranks = self._machine.cycle.ranks
        self.set_state(WorkerState.SUCCEEDED if over.how is events.Exit.SUCCEEDED else WorkerState.FAILED)
        if over.how is events.Exit.SUCCEEDED:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        if over.cause is not None:
            failures = self._failures(self._machine.cycle.failed, over.cause)
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if over.how is events.Exit.STOPPED:
            number = self._launcher.signals.received[0]
            raise SignalException(f"received {number.name}", sigval=number)
        raise JobOverError

    # -- events -------------------------------------------------------------------------------------------

    def _hear(self, event: events.Event) -> None:
        """Tell the machine, and do what can be done at once."""
        seen, before = self._readings(self._machine.cycle.cycle), self._machine.phase
        asked = self._machine.handle(event, time.monotonic_ns(), seen)
        if asked or self._machine.phase is not before:
            LAUNCHER.debug("phase", before.name, "->", self._machine.phase.name, "by", event, "effects", asked)
        if not self._mailbox.post(asked):
            return
        alarm_ns = self._machine.alarm_ns
        if alarm_ns != self._alarm_ns:  # a cancelled timer stays with the reactor until its time
            self._alarm_ns = alarm_ns
            if self._timer is not None:
                self._timer.cancel()
            if alarm_ns is not None:
                delay_s = (alarm_ns - time.monotonic_ns()) / 1e9

                def ring() -> None:
                    self._alarm_ns = None
                    self._hear(events.Tick())

                self._timer = self._launcher.reactor.call_later(delay_s, ring)

    def _take_signals(self) -> None:
        for each in self._launcher.signals.take():
            if isinstance(each, float):
                self._launcher.say(
                    "received SIGINT again: the ranks are still ending, "
                    f"SIGINT or SIGTERM in {each:.1f} s or later kills them"
                )
                continue
            for worker in self._launcher.workers.values():
                worker.poll_end()  # a rank that has ended by then isn't signalled
            self._hear(each)

    def _started(self, worker: Worker) -> None:
        local_rank, rank = worker.local_rank, self._machine.cycle.ranks[worker.local_rank]
        self._launcher.workers[local_rank] = worker
        self._monitors[local_rank].rank_started(worker.pid, rank)
        self._hear(RankStarted(rank=rank, local_rank=local_rank, pid=worker.pid, at_ns=worker.started_at_ns))
        self._launcher.reactor.watch(worker.pidfd, worker.poll_end, Priority.DEATH)

    def _ended(self, worker: Worker) -> None:
        self._launcher.reactor.unwatch(worker.pidfd)
        self._launcher.orphan_watch.check()  # a rank may have ended because its output has no reader
        # first read the messages of the rank or its monitor from before the exit
        self._launcher.control.accept_all()
        self._monitors.hear_all()
        assert worker.exitcode is not None
        local_rank = worker.local_rank
        failed_alone = worker.exitcode != 0 and not worker.signals_sent
        self._launcher.put(
            RankExited(
                rank=self._machine.cycle.ranks[local_rank],
                cycle=self._machine.cycle.cycle,
                local_rank=local_rank,
                pid=worker.pid,
                exitcode=worker.exitcode,
                at_ns=worker.exited_at_ns,
                signals_sent=tuple(sorted(worker.signals_sent)),
                signalled_at_ns=worker.signalled_at_ns,
                kernel=kernel_lines_about(local_rank, worker.pid, worker.started_at_ns, worker.exited_at_ns)
                if failed_alone
                else (),
            )
        )

    # -- effects ------------------------------------------------------------------------------------------

    def _act(self, effect: events.Effect) -> None:
        match effect:
            case Tell(text):
                self._say(text)
            case events.Write(record, at_ns):
                self._launcher.log.write(record, t=at_ns)
            case events.LauncherExit():
                self._launcher.over = effect
            case events.CheckHealth() | events.StartRanks() | events.TerminateRanks():
                self._work = effect
            case StateFile():
                post = self._launcher.reactor.post
                self._file_calls.do(lambda: post(partial(self._hear, carry_out(effect))))
            case ToKeeper(fact):
                self._launcher.keeper.tell(fact)
            case _ if isinstance(effect, NodeMessage):
                self._coordination.tell(effect)
            case _:
                self._act_on_ranks(effect)

    def _act_on_ranks(self, effect: events.Effect) -> None:
        workers = self._launcher.workers
        match effect:
            case TellStateWritten(value):
                for local_rank in workers:
                    self._monitors[local_rank].state_written(value)
            case events.OrderMonitor(local_rank, order):
                self._monitors[local_rank].order(order)
            case Release():
                for slot in self._monitors.slots:
                    slot.order(effect)
            case events.SignalRanks(local_ranks, number, whole_group):
                asked = [workers[local_rank] for local_rank in local_ranks]
                self._termination.ask(asked, number, whole_group=whole_group)
            case events.KeepEvidence(ended):
                words, stderr = self._words(ended.local_rank, ended.cycle), self._stderrs.get(ended.local_rank, "")
                board = self._monitors[ended.local_rank].reading(ended.cycle).snapshot
                log, log_dir = self._launcher.log, self._launcher.log_dir
                keep_evidence(ended, words, board=board, stderr=stderr, log=log, log_dir=log_dir, say=self._say)

    def _check_health(self) -> None:
        """Run the health check, beside ranks if there are any; it is given up once there is something else to do."""
        health, phase = self._launcher.health, self._machine.phase
        assert health is not None

        def check() -> None:
            self._check(self._work is None and self._machine.phase is phase)

        is_beside = phase is AgentPhase.RUNNING
        cycle = self._machine.cycle.cycle if is_beside else self._coordination.next_cycle
        environment = {
            "FT_CYCLE": str(cycle),
            "TORCHELASTIC_RUN_ID": self._launcher.line.run_id,
            "LOCAL_WORLD_SIZE": str(self.spec.local_world_size),
        }
        try:
            checked = health.run(cycle, environment, check)
        except _CycleOverError:
            return
        self._hear(checked)

    def _check(self, is_wanted: bool) -> None:
        if not is_wanted:
            raise _CycleOverError

    def _terminate(self, work: events.TerminateRanks) -> None:
        workers = list(self._launcher.workers.values())
        if work.way is events.TerminationMode.KILLED:
            self._termination.kill(workers)
            if work.leftover_grace_s is not None:
                self._termination.clear(workers, leftover_grace_s=work.leftover_grace_s, ask=False)
        elif work.way is events.TerminationMode.FINISHED:
            self._termination.clear(workers, quietly=False)
        self.end_ranks(work.grace_s)
        self._launcher.control.accept_all()
        there = self._termination.still_there(workers)
        processes = [replace(process_facts(stat.pid), pid=stat.pid) for stat in there]
        stuck = launcher_lines.stuck(there) if there else ""

        def ended(kept: Kept) -> None:
            self._hear(StockTaken(kept))
            self._hear(events.RanksEnded(stuck, processes))

        if work.way is events.TerminationMode.TERMINATED:
            self.forget_store()
            self._device_memory.begin(self._termination.take_let_go())
            self._launcher.keeper.take_stock(ended)
        else:  # ranks that finish or stop have no next cycle: the end of their job waits for no keeper
            ended(Kept())

    # -- the start of ranks ------------------------------------------------------------------------------------

    def _start_ranks(self, work: events.StartRanks) -> None:
        self._starting = work
        self._launcher.workers = {}
        failed: Cause | None = None
        try:
            self.start_ranks(self._machine.restarts_left)
        except (_CycleOverError, SignalException):
            pass
        except RendezvousError as error:
            failed = Cause(kind=CauseKind.MEMBERSHIP, text=launcher_lines.rendezvous_failed(error), follows=True)
        else:
            self._hear(events.RanksStarted())
            if self._launcher.forking is not None:
                self._launcher.forking.release()  # the start of their cycle was reported
            return
        self._take_signals()
        self._hear(events.NotStarted(failed))

    def meet(self, rendezvous: Callable[[WorkerGroup], None], group: WorkerGroup) -> None:
        """Let torch number the ranks in the store of the cycle, for as long as they are wanted.

        Raises:
            RendezvousError: the store, or the nodes, can't be reached.
        """
        # a separate group: an abandoned thread may return from its wait while the next cycle runs
        met = WorkerGroup(group.spec)

        def number_ranks() -> None:
            try:
                rendezvous(met)
            except RendezvousError:
                raise
            except RuntimeError as error:  # torch raises it for every error of a store
                raise RendezvousConnectionError("The store of the ranks can't be reached.") from error

        self._launcher.reactor.call_blocking(number_ranks, self._check_wanted)
        private_names.warn_of_no_lost_connections()  # until now such warnings tell why a host can't be reached
        for name in _MET:
            setattr(group, name, getattr(met, name))
        # each process gets the rank of the one that is ``shift`` places further on this node; its LOCAL_RANK stays
        numbers = [(worker.global_rank, worker.role_rank) for worker in group.workers]
        for worker, both in zip(group.workers, rotated(numbers, self._starting.decision.shift), strict=True):
            worker.global_rank, worker.role_rank = both
        ranks = [worker.global_rank for worker in group.workers]
        nodes, size = group.group_world_size or 1, group.workers[0].world_size
        self._hear(events.RanksMet(ranks, group.group_rank or 0, nodes, size))
        self._launcher.keeper.prepare(
            self._machine.cycle.cycle, ranks, size, self._starting.decision.attachments.get(Restore)
        )

    def _check_wanted(self) -> None:
        self._take_signals()
        self._check(self._machine.wants_ranks)

    def make_ranks(self, *, envs: dict[int, dict[str, str]], logs_specs: LogsSpecs, **given: Any) -> WorkerContext:
        """Return the ranks of a cycle, once the device memory of the last ones is free."""
        self._device_memory.wait(self._check_wanted)
        node, line, cycle = self._launcher, self._launcher.line, self._machine.cycle.cycle
        node.run_dir.mend()
        waiting_s = (time.monotonic_ns() - self._machine.joined_ns) / 1e9
        ours = reference_variables(cycle, time.time(), waiting_s, node.infra_rank)
        ours |= {"FT_LAUNCHER_IPC_SOCKET": node.control.path, "FT_CYCLE": str(cycle), **node.keeper.variables()}
        ours[WATCH_VARIABLE] = "off" if line.options.watch_collectives.how == OFF else "on"
        for local_rank, env in envs.items():
            env.update(ours)
            env["FT_RANK_MONITOR_IPC_SOCKET"] = self._monitors[local_rank].path
        if node.forking is not None:
            # nodes that join or leave restart ranks, too
            node.forking.expects_restart = self._machine.restarts_left > 0 or line.max_nodes > 1
        given.pop("start_method", None)
        specs = CycleLogs(
            logs_specs,
            run_dir=node.run_dir.path,
            say=self._say,
            blocking=node.signals.blocking,
            prefix=line.options.per_cycle_applog_prefix,
        )
        context = WorkerContext(
            spawn=lambda specs: spawn(specs, self._started, self._ended, node.forking),
            environment=line.rank_environment(),
            reactor=node.reactor,
            end=self._termination.end,
            envs=envs,
            logs_specs=specs,
            **given,
        )
        node.workers = context.workers
        self._error_files, self._stderrs = context.error_files, context.stderrs
        return context

    # -- what is read of them ----------------------------------------------------------------------------------

    def _readings(self, cycle: int) -> events.Readings:
        """Return the state of the ranks: each value is read on its first access, and not again."""
        monitors, workers = self._monitors, self._launcher.workers
        return events.Readings(
            boards=_Lazy(lambda local_rank: monitors[local_rank].reading(cycle).snapshot),
            words=_Lazy(lambda local_rank: self._words(local_rank, cycle)),
            stopped=_Lazy(lambda local_rank: process_tree.is_stopped(workers[local_rank].pid)),
            run_delays_ns=_Lazy(lambda local_rank: run_delays_ns(workers[local_rank].pid)),
            checkpointed=lambda: checkpointed(self._launcher.line.options.checkpoint_iteration_file),
            is_finished=lambda: bounded_call(lambda: os.path.exists(os.environ.get(FINISHED_FLAG, "")), False),
            collectives=_Lazy(lambda local_rank: monitors[local_rank].reading(cycle).collectives),
        )

    def _words(self, local_rank: int, cycle: int) -> CrashOutput:
        reported = self._monitors[local_rank].last_words(cycle)
        return read_last_words(reported, self._error_files.get(local_rank, ""), self._stderrs.get(local_rank, ""))

    def _failures(self, failed: Sequence[RankExited], cause: Cause) -> dict[int, ProcessFailure]:
        """Return torch's table of failures, by global rank; torch takes the earliest one for the root cause."""
        failures: dict[int, ProcessFailure] = {}
        earliest = 0
        for rank_exit in sorted(failed, key=lambda rank_exit: (rank_exit.rank != cause.rank, rank_exit.at_ns)):
            failure = _process_failure(rank_exit, self._error_files.get(rank_exit.local_rank, ""))
            earliest = earliest or failure.timestamp
            failure.timestamp = max(earliest, failure.timestamp)
            failures[rank_exit.rank] = failure
        return failures


class _Lazy(dict[int, T]):
    """Reads each value on its first access."""

    def __init__(self, read: Callable[[int], T]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, key: int) -> T:
        value = self[key] = self._read(key)
        return value


def _process_failure(rank_exit: RankExited, error_file: str) -> ProcessFailure:
    failure_of = partial(ProcessFailure, rank_exit.local_rank, rank_exit.pid or 0, rank_exit.exitcode)
    try:
        failure = bounded_call(lambda: failure_of(error_file) if os.path.isfile(error_file) else None, None)
    except Exception:  # noqa: BLE001 - torch raises whatever a half-written file makes it raise
        failure = None
    if failure is None:
        failure = failure_of("")
        failure.timestamp = 0
    if not failure.timestamp:
        failure.timestamp = round(time.time() - (time.monotonic_ns() - rank_exit.at_ns) / 1e9)
    if rank_exit.exitcode == 0:
        failure.message = "exited with 0 after its monitor had found it hung"
    return failure


def machine_options(line: CommandLine, *, checks_health: bool, instance: str = "") -> Options:
    """Return what the launcher's machine decides by."""
    return Options(
        given=line.options,
        instance=instance,
        max_nodes=line.max_nodes,
        max_restarts=line.namespace.max_restarts,
        ranks_are_python=not line.namespace.no_python,
        checks_health=checks_health,
        says_all=line.says_all,
        shares_output=line.where.launchers > 0,  # srun's, unless told otherwise
    )
