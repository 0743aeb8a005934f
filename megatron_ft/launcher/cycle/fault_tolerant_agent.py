"""torch's elastic agent around the launcher's machine: turns occurrences into events, and carries out effects.

`launcher.rules` makes the decisions. Effects that take time run on torch's loop, one after the other; all others at
once, wherever the launcher is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from megatron_ft.config.launcher_options import END, MIN_HEALTHY, OFF
from megatron_ft.errors import FaultToleranceError
from megatron_ft.job.coordination import Coordination
from megatron_ft.job.rules.actions import Say
from megatron_ft.job.rules.messages import Goodbye, NodeMessage, StockTaken
from megatron_ft.job.rules.rotation import rotated
from megatron_ft.launcher.base import launcher_lines
from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.cycle.node import LauncherNode
from megatron_ft.launcher.cycle.node_ranks import NodeRanks
from megatron_ft.launcher.cycle.parts import launcher_parts
from megatron_ft.launcher.processes.crash_evidence import kernel_lines_about
from megatron_ft.launcher.processes.worker import Worker
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.rules.agent import Agent, AgentPhase
from megatron_ft.launcher.rules.turn import Options
from megatron_ft.launcher.torch_compat import private_names
from megatron_ft.launcher.torch_compat.torch_agent import TorchAgent, WorkerContext
from megatron_ft.learning.launcher.part import LearningOptions, TellStateWritten
from megatron_ft.learning.state import Configured, StateFile
from megatron_ft.learning.state_file import carry_out
from megatron_ft.link.base.launcher_part import PartEffect
from megatron_ft.link.base.mailbox import Mailbox
from megatron_ft.link.base.state_table import report_unlisted
from megatron_ft.link.facts.launcher import Cause, CauseKind, RankExited, RankStarted
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.linux.proc import process_facts
from megatron_ft.link.log import LAUNCHER
from megatron_ft.link.reactor import Timer
from megatron_ft.memory.launcher.snapshots_on_node import ToKeeper
from megatron_ft.memory.rules.snapshots import Kept

_MET = ("workers", "store", "group_rank", "group_world_size", "master_addr", "master_port")
"""What torch writes into a group of workers where nodes meet."""
LAST_WRITE_S = 2.0
"""Seconds the launcher's exit waits for a write of learned timeouts."""


class JobOverError(FaultToleranceError):
    """Raised when this launcher's part in the job is over, and its lines about that are printed."""


class _CycleOverError(FaultToleranceError):
    """Raised when the next cycle isn't wanted any more, to give up its preparation."""


class FaultTolerantAgent(TorchAgent):
    """One node's agent.

    ``on_over`` is called with how this launcher's part in the job has ended, before ``run`` returns or raises.
    """

    def __init__(
        self,
        *,
        launcher: LauncherNode,
        coordination: Coordination,
        on_over: Callable[[events.LauncherExit], None],
        **torch_arguments: Any,
    ) -> None:
        super().__init__(grace_s=launcher.line.options.workers_stop_timeout, **torch_arguments)
        report_unlisted(LAUNCHER.debug)
        self._on_over = on_over
        self._launcher = launcher
        self._monitors, self._health, self._ranks = launcher.monitors, launcher.health, NodeRanks(launcher)
        self._coordination = coordination
        given, options = launcher.line.options, _options(launcher.line, checks_health=launcher.health is not None)
        configured = Configured.of(given.to_dict())
        learning = LearningOptions(given.learn, given.safety_factor, given.learned_floor, configured)
        parts = launcher_parts(options, learning, launcher.monitors.paused, launcher.files.found)
        self._machine = Agent(options, parts, coordination.orders)
        self._file_calls = FileQueue()
        """Reads and writes the file of learned timeouts: a stuck file server must not stop the launcher."""
        self._starting: events.StartRanks
        self._mailbox: Mailbox[events.Effect] = Mailbox(self._act)
        self._work: events.Work | None = None
        self._over: events.LauncherExit | None = None
        self._timer: Timer | None = None
        self._alarm_ns: int | None = None
        """Time of the timer; None without one."""
        launcher.status.follow(self._machine)
        launcher.inbox.open(self._receive)
        if coordination.left is not None:
            self._hear(coordination.left)

    # -- torch's loop -------------------------------------------------------------------------------------

    def run_job(self) -> RunResult:
        """Serve events until the machine says that this launcher's part is over."""
        try:
            self._take_signals()
            self._hear(events.Tick())
            while self._over is None:
                work, self._work = self._work, None
                if work is not None:
                    self._perform(work)
                else:
                    self._serve()
        except BaseException as error:
            # whatever it is: tell the other nodes at once, and why
            self._launcher.inbox.close()
            if self._coordination.left is None:
                goodbye = Goodbye(f"its launcher failed: {launcher_lines.in_one_line(error)}", failed=True)
                self._coordination.tell(goodbye)
                over_s = time.monotonic() + goodbye.within_s
                self._launcher.reactor.run_until(lambda: self._coordination.left is not None, deadline_s=over_s)
            raise
        finally:
            self._file_calls.finish(LAST_WRITE_S)
        return self._result(self._over)

    def _serve(self) -> None:
        """Wait for an event."""
        is_running = self._machine.phase is AgentPhase.RUNNING
        if is_running:
            self.check_none_is_stuck()
        self._launcher.reactor.run_once(float(self._launcher.line.namespace.monitor_interval) if is_running else None)

    def _result(self, over: events.LauncherExit) -> RunResult:
        self._on_over(over)
        ranks = self._machine.cycle.ranks
        self.set_state(WorkerState.SUCCEEDED if over.how is events.Exit.SUCCEEDED else WorkerState.FAILED)
        if over.how is events.Exit.SUCCEEDED:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        if over.cause is not None:
            failures = self._ranks.failures(self._machine.cycle.failed, over.cause)
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if over.how is events.Exit.STOPPED:
            number = self._launcher.signals.received[0]
            raise SignalException(f"received {number.name}", sigval=number)
        raise JobOverError

    # -- events -------------------------------------------------------------------------------------------

    def _receive(self, event: events.Event | SignalWatch) -> None:
        if isinstance(event, SignalWatch):
            self._take_signals()
        else:
            self._hear(event)

    def _hear(self, event: events.Event) -> None:
        """Tell the machine, and do what can be done at once."""
        seen, before = self._ranks.readings(self._machine.cycle.cycle), self._machine.phase
        asked = self._machine.handle(event, time.monotonic_ns(), seen)
        if asked or self._machine.phase is not before:
            LAUNCHER.debug("phase", before.name, "->", self._machine.phase.name, "by", event, "effects", asked)
        if not self._mailbox.post(asked):
            return
        alarm_ns = self._machine.alarm_ns
        if alarm_ns != self._alarm_ns:
            self._alarm_ns = alarm_ns
            if self._timer is not None:
                self._timer.cancel()
            if alarm_ns is not None:
                delay_s = (alarm_ns - time.monotonic_ns()) / 1e9
                self._timer = self._launcher.reactor.call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._alarm_ns = None
        self._hear(events.Tick())

    def _take_signals(self) -> None:
        signals = self._launcher.signals
        if signals.take_continued():
            self._hear(events.Continued())
        for number, again in signals.take_requests():
            self._ranks.poll_ends()  # a rank that has ended by then isn't signalled
            self._hear(events.StopAsked(number, again))
        if (wait_s := signals.take_early()) is not None:
            self._launcher.say(
                "received SIGINT again: the ranks are still ending, "
                f"SIGINT or SIGTERM in {wait_s:.1f} s or later kills them"
            )

    def _started(self, worker: Worker) -> None:
        local_rank, rank = worker.local_rank, self._machine.cycle.ranks[worker.local_rank]
        self._monitors[local_rank].rank_started(worker.pid, rank)
        self._hear(RankStarted(rank=rank, local_rank=local_rank, pid=worker.pid, at_ns=worker.started_at_ns))

    def _ended(self, worker: Worker) -> None:
        self._launcher.orphan_watch.check()  # a rank may have ended because its output has no reader
        # first read the messages of the rank or its monitor from before the exit
        self._launcher.control.accept_all()
        self._monitors.hear_all()
        assert worker.exitcode is not None
        local_rank = worker.local_rank
        failed_alone = worker.exitcode != 0 and not worker.signals_sent
        self._hear(
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
            case events.TellStop(ranks):
                self._launcher.signals.report(ranks=ranks)
            case Say(text):
                self._launcher.say(text)
            case events.Write(record, at_ns):
                self._launcher.log.write(record, t=at_ns)
            case events.CycleRetrying():
                self.forget_store()
                self._ranks.let_go()
            case events.LauncherExit():
                self._over = effect
            case events.CheckHealth() | events.StartRanks() | events.TerminateRanks():
                self._work = effect
            case PartEffect():
                self._act_for_part(effect)
            case _ if isinstance(effect, NodeMessage):
                self._coordination.tell(effect)
            case _:
                self._ranks.act(effect)

    def _act_for_part(self, effect: PartEffect) -> None:
        match effect:
            case StateFile():
                post = self._launcher.reactor.post
                self._file_calls.do(lambda: post(partial(self._hear, carry_out(effect))))
            case TellStateWritten(value):
                self._ranks.state_written(value)
            case ToKeeper(fact):
                self._launcher.keeper.tell(fact)

    def _perform(self, work: events.Work) -> None:
        match work:
            case events.CheckHealth():
                self._check_health()
            case events.StartRanks():
                self._start_ranks(work)
            case events.TerminateRanks():
                self._terminate(work)

    def _check_health(self) -> None:
        """Run the health check, beside ranks if there are any; it is given up once there is something else to do."""
        assert self._health is not None
        phase = self._machine.phase
        is_beside = phase is AgentPhase.RUNNING

        def check() -> None:
            self._check(self._work is None and self._machine.phase is phase)
            if is_beside:
                self.check_none_is_stuck()

        cycle = self._machine.cycle.cycle if is_beside else self._coordination.next_cycle
        environment = {
            "FT_CYCLE": str(cycle),
            "TORCHELASTIC_RUN_ID": self._launcher.line.run_id,
            "LOCAL_WORLD_SIZE": str(self.spec.local_world_size),
        }
        try:
            checked = self._health.run(cycle, environment, check)
        except _CycleOverError:
            return
        self._hear(checked)

    def _check(self, is_wanted: bool) -> None:
        if not is_wanted:
            raise _CycleOverError

    def _terminate(self, work: events.TerminateRanks) -> None:
        def end_rest() -> None:
            self.grace_s = work.grace_s
            self.end_ranks()
            self._launcher.control.accept_all()

        there = self._ranks.terminate(work, end_rest)
        processes = [replace(process_facts(stat.pid), pid=stat.pid) for stat in there]
        stuck = launcher_lines.stuck(there) if there else ""

        def ended(kept: Kept) -> None:
            self._hear(StockTaken(kept))
            self._hear(events.RanksEnded(stuck, processes))

        if work.way is events.TerminationMode.TERMINATED:
            self._launcher.keeper.take_stock(ended)
        else:  # ranks that finish or stop have no next cycle: the end of their job waits for no keeper
            ended(Kept())

    # -- the start of ranks ------------------------------------------------------------------------------------

    def _start_ranks(self, work: events.StartRanks) -> None:
        self._starting = work
        self._ranks.forget()
        failed: Cause | None = None
        try:
            self.start_ranks(work.restarts_left)
        except (_CycleOverError, SignalException):
            pass
        except RendezvousError as error:
            failed = Cause(kind=CauseKind.MEMBERSHIP, text=launcher_lines.rendezvous_failed(error), follows=True)
        else:
            self._hear(events.RanksStarted())
            self._ranks.release()
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
        self._launcher.keeper.prepare(self._machine.cycle.cycle, ranks, size, self._starting.decision.restore)

    def _check_wanted(self) -> None:
        self._take_signals()
        self._check(self._machine.wants_ranks)

    def make_ranks(self, *, envs: dict[int, dict[str, str]], **given: Any) -> WorkerContext:
        """Return the ranks of a cycle, once there is room for them."""
        return self._ranks.make(
            cycle=self._machine.cycle.cycle,
            waiting_s=(time.monotonic_ns() - self._machine.joined_ns) / 1e9,
            restarts_left=self._starting.restarts_left,
            on_start=self._started,
            on_exit=self._ended,
            check=self._check_wanted,
            envs=envs,
            **given,
        )


def _options(line: CommandLine, *, checks_health: bool) -> Options:
    """The part of the command line that the launcher's machine decides by."""
    given = line.options
    return Options(
        max_nodes=line.max_nodes,
        min_healthy=given.restart_policy == MIN_HEALTHY,
        max_restarts=line.namespace.max_restarts,
        term_timeout_s=given.term_timeout,
        stop_timeout_s=given.workers_stop_timeout,
        restart_grace_s=line.restart_grace,
        startup_timeout_s=given.startup_timeout,
        exit_timeout_s=given.exit_timeout,
        hang_signal=given.rank_termination_signal,
        observe_only=given.observe_only,
        ranks_are_python=line.ranks_are_python,
        checks_health=checks_health,
        health_interval_s=given.node_health_check_interval if checks_health else None,
        watches_collectives=given.watch_collectives.how != OFF,
        collectives_timeout_s=given.watch_collectives.timeout_s,
        ends_for_collectives=given.watch_collectives.how == END,
        says_all=line.says_all,
        shares_output=line.where.launchers > 0,  # srun's, unless told otherwise
    )
