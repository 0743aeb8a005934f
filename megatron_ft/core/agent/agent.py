"""The launcher's decisions, without I/O: the life of each cycle on one node, from the node's health to its end.

``handle`` takes an event, the time and the ranks' readings, and returns what is to be done, in order.
`docs/design/agent.md` lists the phases and their transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from signal import Signals

from msgspec.structs import replace

from megatron_ft.core.agent import cycle_lines, effects, events
from megatron_ft.core.agent.conclusion import EndOfCycle, LeaveReason, asked_at_last, conclude, finish, report
from megatron_ft.core.agent.coordinator_view import CoordinatorView
from megatron_ft.core.agent.effects import Effect, Exit, LauncherExit, Write
from megatron_ft.core.agent.hang import write_finding
from megatron_ft.core.agent.health import HealthGate
from megatron_ft.core.agent.job_line_printer import JobLinePrinter
from megatron_ft.core.agent.node_cycle import Downtime, NodeCycle
from megatron_ft.core.agent.phases import TRANSITIONS, PhaseEvent
from megatron_ft.core.agent.rank_shutdown import RankShutdown
from megatron_ft.core.agent.turn import AgentPhase, Options, Turn
from megatron_ft.core.control import WorkloadAction, WorkloadControl
from megatron_ft.core.facts.launcher import (
    Abandoned,
    Cause,
    CauseKind,
    CycleEnded,
    CycleStarted,
    HangReported,
    NodeHealth,
    NodeLost,
    RestoreFailed,
    SnapshotRestored,
    Stuck,
)
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.pauses import Pauses
from megatron_ft.core.state_table import follow
from megatron_ft.core.times import earliest
from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Reviewed
from megatron_ft.diagnosis.waits import Lags
from megatron_ft.job.rules import actions as job
from megatron_ft.job.rules.actions import Say
from megatron_ft.job.rules.messages import End, Goodbye, Ready, Shutdown, StockTaken, Verdict
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome, RestartDecision
from megatron_ft.learning.launcher_part import LauncherLearning, StateFileDone
from megatron_ft.learning.messages import Intervals, Killed
from megatron_ft.memory.rules.snapshots import (
    CopyTo,
    KeeperPort,
    Kept,
    OfSnapshots,
    Restore,
    Restored,
    Saved,
    Settled,
)
from megatron_ft.records.rules.metrics import NodeActivity

_ACTIVITIES = {
    AgentPhase.JOINING: NodeActivity.WAITING,
    AgentPhase.CHECKING: NodeActivity.WAITING,
    AgentPhase.ASIDE: NodeActivity.UNFIT,
    AgentPhase.READY: NodeActivity.WAITING,
    AgentPhase.STARTING: NodeActivity.WAITING,
    AgentPhase.RUNNING: NodeActivity.TRAINING,
    AgentPhase.ENDING: NodeActivity.ENDING,
    AgentPhase.TERMINATING: NodeActivity.ENDING,
    AgentPhase.JUDGING: NodeActivity.ENDING,
    AgentPhase.DONE: NodeActivity.ENDED,
    AgentPhase.LEAVING: NodeActivity.LEAVING,
    AgentPhase.EXCLUDED: NodeActivity.LEAVING,
    AgentPhase.OVER: NodeActivity.ENDED,
}


class Agent:
    """State machine of one launcher.

    ``pauses``: times in which hang detection is suspended; ``found``: what it can restore before its first cycle.
    """

    def __init__(
        self,
        options: Options,
        pauses: Pauses,
        orders: CoordinatorView | None = None,
        found: Kept = Kept(),  # noqa: B008 - frozen
    ) -> None:
        self.phase = AgentPhase.JOINING
        self.started: NodeCycle | None = None
        """Last cycle whose ranks were started."""
        self.ended: CycleEnded | None = None
        """End of the last cycle; None while ranks run."""
        self.failed: CycleEnded | None = None
        """Last end of a cycle that didn't end well."""
        self.restarts_left = options.max_restarts
        self.joined_ns = 0
        """When this node began to wait for the cycle that is about to start, or runs; 0 for the first."""
        self._options = options
        self._pauses = pauses
        self._turn = Turn(now_ns=0, seen=events.Readings({}, {}, {}, {}))
        self._orders = orders or CoordinatorView()
        self._printer = JobLinePrinter(says_all=options.says_all, shares_output=options.shares_output)
        self._health = HealthGate()
        self._learning = LauncherLearning(options.learning)
        self._would_hang: set[tuple[str, int | None]] = set()
        """Intervals reported to the user as hangs that end nothing."""
        self.cycle = NodeCycle(options, -1, None, self._learning, now_ns=0)
        """Cycle that is about to start, or runs, or has ended last."""
        self._cycles = 0
        self._downtime: Downtime | None = None
        self._leaving = LeaveReason()
        self._outcome = Outcome.STOPPED
        self._ending: RankShutdown | None = None
        self._ended_well = False
        """True if all ranks of the last cycle ended with 0."""
        self._stuck = ""
        """Processes of the node's ranks that can't be killed, in words."""
        self._known: EndOfCycle | None = None
        self._found = self._kept = found
        self._restore: Restore | None = None
        """Snapshot that the ranks of the last cycle were started from."""
        self._back: tuple[str, ...] = ()
        self._begun_ns: int | None = None
        self._ending_ns: int | None = None

    def handle(self, event: events.Event, now_ns: int, seen: events.Readings) -> list[Effect]:
        """Return what is to be done. At most one effect is an `effects.Work`; the next one follows after its result."""
        self._turn = Turn(now_ns=now_ns, seen=seen, printer=self._printer)
        self._do(*self._printer.hear(event))
        self._hear(event)
        self.cycle.go_on(self._turn, is_stopping=bool(self._leaving.signals))
        self._learning.tick(self._turn)
        before = None
        while before is not self.phase:
            before = self.phase
            self._go_on()
        return self._turn.effects

    @property
    def alarm_ns(self) -> int | None:
        """Latest time of the next `Tick`."""
        times = [self.cycle.alarm_ns(self._turn.now_ns), self._learning.due_ns]
        if self.phase is AgentPhase.ASIDE:
            times.append(self._health.retry_ns)
        elif self.phase is AgentPhase.ENDING and self._ending is not None:
            times.append(self._ending.alarm_ns)
        return earliest(*times)

    @property
    def is_spokesman(self) -> bool:
        """True if this launcher alone speaks for the job."""
        return self._printer.is_spokesman

    @property
    def lags(self) -> Lags:
        """How much which ranks of the running cycle hold the others back, on the launcher that speaks for the job."""
        waits = self.cycle.waits if self.phase is AgentPhase.RUNNING else None
        return Lags(self.cycle.record.cycle, 0.0) if waits is None else waits.lags

    @property
    def activity(self) -> NodeActivity:
        """State of the node for metrics."""
        waits = self.phase in (AgentPhase.JOINING, AgentPhase.CHECKING, AgentPhase.READY)
        return NodeActivity.STANDBY if waits and self._orders.stands_by else _ACTIVITIES[self.phase]

    @property
    def wants_ranks(self) -> bool:
        """True while ranks that are about to be started are still wanted."""
        return self.phase is AgentPhase.STARTING and not (self._orders.is_over or self._leaving.is_due)

    def _move(self, event: PhaseEvent) -> None:
        """Enter the phase that the table names."""
        self.phase = follow(TRANSITIONS, self.phase, event)

    # -- what happens -----------------------------------------------------------------------------------------

    def _hear(self, event: events.Event) -> None:
        match event:
            case events.StopAsked():
                self._leaving.asked(event)
                if self.phase is AgentPhase.ENDING and self._ending is not None:
                    self._ending.stop_asked([event.number], self._leaving.hurry, self._turn)
            case events.Continued():
                self.cycle.excuse_stop(self._turn.now_ns)
            case Abandoned(text=text) if not self._leaving.abandoned:
                self._leaving.abandon(text)
                self._do(Say(cycle_lines.abandoned(text)), Write(event))
            case NodeHealth() if self.phase is AgentPhase.CHECKING:
                if self._health.take_result(event, self._turn):
                    self._get_ready()
                else:
                    self._move(PhaseEvent.UNFIT)
            case NodeHealth() if self.phase is AgentPhase.RUNNING:
                self._health.take_result_while_running(event, self._turn)
            case NodeHealth():  # this node leaves the job, and has said so
                self._do(Write(event))
            case WorkloadControl():
                self._requested(event)
            case job.Begin() | job.StandBy() | End() | Verdict() | job.LeftOut() | job.Leave():
                self._orders.hear(event)
            case _:
                self._hear_of_cycle(event)

    def _hear_of_cycle(self, event: events.Event) -> None:
        match event:
            case Intervals() | Killed() | StateFileDone():
                self._learning.hear(event, self._turn)
            case Reviewed(timed=timed) if timed and self._runs(event.cycle):
                interval = event.timed, event.iteration
                if interval not in self._would_hang:
                    self._would_hang.add(interval)
                    self._turn.say_for_all(cycle_lines.would_be_hang(event, observes_only=self._options.observe_only))
                    told = HangReported(
                        cycle=event.cycle,
                        rank=event.rank,
                        section=timed,
                        iteration=event.iteration,
                        elapsed_s=event.elapsed_s,
                        text=event.text,
                    )
                    self._do(Write(told))
                    self._learning.reported(timed, self._turn)
            case DiagnoseHang() | Reviewed() if self._runs(event.cycle):
                self.cycle.hear_of_others(event, self._turn)
            case Lags():
                self.cycle.told(event, self._turn)
            case NodeLost():
                self._do(Write(event))
            case Settled() | CopyTo() | StockTaken() | Saved() | KeeperPort() | SnapshotRestored() | Restored():
                self._hear_of_snapshots(event)
            case _:
                self._hear_of_ranks(event)

    def _hear_of_snapshots(self, event: OfSnapshots | events.FromKeeper) -> None:
        record = self.cycle.record
        match event:
            case Settled(key) | Saved(key) if self._runs(key.cycle):
                self._do(event)
            case CopyTo(cycle) | KeeperPort(cycle) | Restored(cycle) if self._runs(cycle):
                self._do(event)
            case SnapshotRestored() if self._runs(event.cycle) and record.unrestored is None:
                redone = None if self._restore is None else self._restore.redone
                self._do(
                    Write(replace(event, ranks=tuple(record.ranks), redone=redone)),
                    Restored(record.cycle, event.key, newer_than=event.newer_than),
                )
            case StockTaken(kept):
                self._take_stock(kept)
                if self.phase is AgentPhase.READY and not self._orders.has_begun:
                    self._do(StockTaken(self._kept))

    def _runs(self, cycle: int) -> bool:
        """Return True if ranks of that cycle run here, or start."""
        runs = self.phase in (AgentPhase.STARTING, AgentPhase.RUNNING) and not self._orders.is_over
        return runs and cycle == self.cycle.record.cycle

    def _take_stock(self, kept: Kept) -> None:
        # ranks of a cycle that ended before its nodes had met aren't known, and are as many as before
        ran = len(self.cycle.record.ranks) or self._kept.local_ranks
        found, local_ranks = self._found, ran if kept.snapshots else self._found.local_ranks
        self._kept = replace(kept, local_ranks=local_ranks, files=found.files, reads_files=found.reads_files)

    def _hear_of_ranks(self, event: events.Event) -> None:
        match event:
            case events.RanksMet():
                self.cycle = NodeCycle(
                    self._options, self.cycle.record.cycle, event, self._learning, now_ns=self._turn.now_ns
                )
                place, world_size = event.group_rank, event.world_size
                self._learning.begin(self.cycle.record, place=place, world_size=world_size)
            case events.RanksStarted():
                self._ranks_started()
            case events.NotStarted(cause):
                self._move(PhaseEvent.START_GIVEN_UP if self._leaving.is_due else PhaseEvent.NOT_STARTED)
                if cause is not None:
                    self._report(NodeState.UNHEALTHY, cause)
            case events.RanksEnded():
                self._ranks_ended(event)
            case RestoreFailed() if self._orders.is_over:
                pass  # its rank was terminated
            case events.MonitorReport(local_rank, Intervals() as report):
                self._learning.hear_monitor(local_rank, report, self._turn)
            case events.MonitorReport(report=RankHung(observed_only=True, learned=True) as verdict):
                self.cycle.would_hang(verdict, self._turn)
            case events.MonitorReport(report=RankHung(observed_only=True) as verdict):
                self._do(Say(cycle_lines.observed(verdict)))
            case _:
                self.cycle.hear(event, self._turn)
                if isinstance(event, events.MonitorReport):
                    self._learning.hear_monitor(event.local_rank, event.report, self._turn)
        if self._downtime is not None and self._downtime.report_end(self.cycle.record, self._turn):
            self._downtime = None

    def _requested(self, request: WorkloadControl) -> None:
        self._do(Write(request))
        if request.action == WorkloadAction.Continue.name or self._orders.taken is None:
            self._do(Say(request.text))
            return
        self.cycle.record.requested(request)
        if request.action == WorkloadAction.ShutdownWorkload.name:
            self._do(Shutdown(request.text, request.rank))

    def _do(self, *effects: Effect) -> None:
        self._turn.do(*effects)

    def _go_on(self) -> None:
        match self.phase:
            case AgentPhase.JOINING | AgentPhase.CHECKING | AgentPhase.ASIDE | AgentPhase.READY:
                self._between()
            case AgentPhase.RUNNING:
                self._run()
            case AgentPhase.ENDING if self._ending is not None and self._ending.is_over(self._turn.now_ns):
                self._move(PhaseEvent.RANKS_DUE)
                self._do(self._ending.order(self._turn.now_ns))
            case AgentPhase.JUDGING:
                self._wait_for_verdict()
            case AgentPhase.DONE if self._leaving.signals:
                self._stop()
            case AgentPhase.DONE:
                self._wait_for_the_end()
            case AgentPhase.LEAVING if self._leaving.is_excluded:
                self._leave_excluded(self._orders.left)
            case AgentPhase.LEAVING if self._orders.left is not None:
                self._over(self._leaving.over())
            case AgentPhase.EXCLUDED if self._orders.left is not None:
                self._over(LauncherExit(Exit.STAYED, self._orders.left.code, self._orders.left.text))
            case AgentPhase.EXCLUDED if self._leaving.is_due:
                self._stop(well=True)

    # -- between cycles ---------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._move(PhaseEvent.RESTART)
        self.joined_ns = self._turn.now_ns
        self._ended_well, self._health = False, HealthGate()

    def _between(self) -> None:
        left = self._orders.left
        if self._leaving.is_due:
            self._stop(well=self._orders.stands_by)
        elif left is not None and left.code == 1 and left.text:
            self._over(
                LauncherExit(Exit.FAILED, 1, left.text, self._orders.verdict), cycle_lines.shut_down_between(left.text)
            )
        elif left is not None:
            text = left.text or ("its health check failed" if self._health.failures else "")
            self._over(LauncherExit(Exit.LEFT, left.code, text))
        elif self.phase is AgentPhase.JOINING and not self._options.checks_health:
            self._get_ready()
        elif self.phase is AgentPhase.JOINING or (
            self.phase is AgentPhase.ASIDE and self._turn.now_ns >= self._health.retry_ns
        ):
            self._move(PhaseEvent.CHECK_DUE)
            self._do(effects.CheckHealth())
        elif self.phase is AgentPhase.READY and self._orders.has_begun:
            self._start()

    def _get_ready(self) -> None:
        self._move(PhaseEvent.FIT)
        self._health = HealthGate()
        if not self._orders.has_begun:
            self._do(Ready(self._kept))

    # -- a cycle ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        decision = self._orders.take().decision
        self._move(PhaseEvent.BEGIN)
        self.restarts_left = max(0, self._options.max_restarts - decision.restarts)
        self.cycle = NodeCycle(self._options, decision.cycle, None, self._learning, now_ns=self._turn.now_ns)
        self._restore, self._back, self._begun_ns = decision.restore, decision.back, self._turn.now_ns
        self._do(effects.StartRanks(self.restarts_left, shift=decision.shift, restore=decision.restore))

    def _ranks_started(self) -> None:
        self._move(PhaseEvent.STARTED)
        self.started, self.ended = self.cycle, None
        self.cycle.started(self._pauses, self._turn)
        record, met = self.cycle.record, self.cycle.met
        assert met is not None
        self._turn.say_for_all(cycle_lines.cycle_started(record.cycle, met.world_size, record.ranks, met.nodes))
        started = CycleStarted(
            cycle=record.cycle,
            ranks=tuple(record.started.values()),
            group_rank=met.group_rank,
            world_size=met.world_size,
            max_restarts=self._options.max_restarts,
            restarts_left=self.restarts_left,
            back=self._back,
            begun_ns=self._begun_ns,
            met_ns=record.met_ns,
            spawned_ns=record.spawned_ns,
        )
        self._do(Write(started))

    def _run(self) -> None:
        if self._leaving.signals:
            self._end_ranks(Outcome.STOPPED, signals=self._leaving.signals)
        elif self._leaving.abandoned:
            self._report(NodeState.LOST, Cause(kind=CauseKind.MEMBERSHIP, text=self._leaving.abandoned))
            self._end_ranks(Outcome.STOPPED)
        elif self.cycle.record.exclude_request is not None:
            self._end_ranks(Outcome.EXCLUDED)
        else:
            state = self.cycle.state(self._turn)
            if state is not NodeState.HEALTHY:
                self._report(state)
            if self._orders.is_over:
                self._end_ranks(self._orders.outcome)

    def _report(self, state: NodeState, cause: Cause | None = None) -> None:
        if self._orders.may_be_news(state, is_mixed=self.cycle.record.unrestored is not None):
            now = report(self.cycle.record, state, cause, self._turn.seen)
            if self._orders.report(now):
                self._do(now, *([] if self._orders.is_over else self._printer.failed(now)))

    def _report_own_failure(self) -> None:
        """Report why the cycle has failed, maybe because others have lost a rank of this node that is slow to end."""
        cause = None if self._options.min_healthy else self.cycle.record.own_failure(self._turn.seen)
        if cause is not None:
            self._report(NodeState.UNHEALTHY, cause)

    # -- its end ----------------------------------------------------------------------------------------------

    def _end_ranks(self, outcome: Outcome, signals: Sequence[Signals] = ()) -> None:
        """End the ranks of this node; ``signals`` are those that asked for it."""
        record = self.cycle.record
        self._move(PhaseEvent.CYCLE_ENDS)
        self._outcome, self._ending_ns = outcome, self._turn.now_ns
        if outcome is Outcome.EXCLUDED:
            self._report(NodeState.EXCLUDED, record.request_cause())
        self.cycle.last_look.close()
        self.cycle.diagnosis.close(self._turn)
        if outcome is Outcome.FAILED:
            self._report_own_failure()
        if signals:
            self._do(effects.TellStop(len(record.running)))
        end = self._orders.end
        self._ending = RankShutdown(
            self._options,
            record,
            outcome,
            by_signals=bool(signals),
            restarts=end is not None and end.restarts,
            by_themselves=end is not None and end.by_themselves,
            turn=self._turn,
        )
        self._ending.stop_asked(self._leaving.signals, self._leaving.hurry, self._turn)

    def _ranks_ended(self, event: events.RanksEnded) -> None:
        record, met = self.cycle.record, self.cycle.met
        self._move(PhaseEvent.RANKS_ENDED)
        self.cycle.read_late_words(self._turn, waits=False)
        self._take_stock(event.kept)
        self._ended_well, self._cycles = record.all_have_ended and not record.failed, self._cycles + 1
        if self._outcome is Outcome.FAILED:
            self._report_own_failure()
        is_alone = met is not None and met.nodes == 1
        if self._outcome is Outcome.STOPPED and not self._leaving.is_due and self._ended_well and is_alone:
            self._outcome = Outcome.SUCCEEDED  # the request to end came from a job that was at its end
        self._stuck = "" if self._outcome is Outcome.SUCCEEDED else event.stuck
        if self._stuck:
            self._do(Write(Stuck(cycle=record.cycle, processes=tuple(event.processes))))

    def _wait_for_verdict(self) -> None:
        """Wait for the verdict on the cycle; none comes if this node leaves, or the others have lost it."""
        orders = self._orders
        leaves = self._outcome is Outcome.EXCLUDED or (self._outcome is Outcome.STOPPED and self._leaving.is_due)
        if leaves:
            self._conclude(None)
        elif orders.is_lost or orders.verdict is not None or orders.left is not None or self._leaving.is_due:
            self._conclude(orders.verdict)

    def _conclude(self, verdict: Verdict | None) -> None:
        record, orders = self.cycle.record, self._orders
        self._outcome = asked_at_last(record, self._outcome)
        known = self._known = EndOfCycle(record, orders, verdict, self._leaving, self.restarts_left)
        if self._outcome is Outcome.SUCCEEDED:
            self._tell_end(RestartDecision(action=Action.FINISH, restarts_left=self.restarts_left, reason=""), None)
            self._finish_part()
            return
        if self._outcome is Outcome.EXCLUDED:
            self._say_goodbye(self._leaving.leave_out(record.request_cause(), ""))
            return
        if self._leaving.signals:
            self._do(effects.TellStop(0))
        decision, cause = conclude(known, self._outcome)
        if self._stuck and decision.action is Action.RESTART:
            # new ranks would need what the stuck processes hold: devices, memory, ports
            self._say_goodbye(self._leaving.leave_out(cause, self._stuck))
            return
        # otherwise it is logged already
        if verdict is not None and verdict.node == orders.place and record.found is None:
            self._do(*write_finding(record.cycle, cause))
        self._tell_end(decision, cause)
        if self._leaving.is_due:
            self._stop()
        elif decision.action is Action.GIVE_UP:
            self._finish_part()
        else:
            self._do(effects.CycleRetrying())
            self._join()

    def _tell_end(self, decision: RestartDecision, cause: Cause | None) -> None:
        record, last = self.cycle.record, self.cycle.record.last_iteration(self._turn.seen)
        ended = self.ended = CycleEnded(
            cycle=record.cycle,
            outcome=self._outcome.value,
            cause=cause,
            action=decision.action.value,
            iteration=last if cause is None or cause.iteration is None else cause.iteration,
            restarts_left=decision.restarts_left,
            noticed_ns=record.noticed_ns(),
            ending_ns=self._ending_ns,
        )
        if cause is not None:
            self.failed = ended
            self._downtime = Downtime(record, self._turn)
            line = cycle_lines.cycle_ended(record.cycle, cause, decision, self._outcome, self._options.max_restarts)
            # for this node alone, as far as it knows: no other node explains it
            known, leaving = self._known, self._leaving
            is_own = known is None or known.verdict is None or leaving.is_due or leaving.goodbye is not None
            self._do(*([Say(line)] if is_own else self._printer.for_all(line, ends_cycle=True)))
        self._do(Write(ended))

    # -- the end of this launcher's part ------------------------------------------------------------------------

    def _finish_part(self) -> None:
        self._move(PhaseEvent.NO_RESTART)
        if self._orders.left is None:
            self._do(Ready(self._kept))

    def _wait_for_the_end(self) -> None:
        """Stay until every node knows how the job has ended; a coordinator that hasn't received that may go on."""
        known, left = self._known, self._orders.left
        assert known is not None
        cause = None if self.ended is None else self.ended.cause
        if left is not None and cause is not None:
            self._over(finish(known, cause, left, is_min_healthy=self._options.min_healthy))
        elif left is not None:
            text = "" if known.verdict is None else known.verdict.cause.text
            over = LauncherExit(Exit.SUCCEEDED, 0, verdict=known.verdict)
            self._over(over, text or cycle_lines.run_finished(self._cycles))
        elif self._orders.has_begun:
            self._join()
        elif (again := self._orders.verdict) is not None and again != known.verdict:
            if again.decision.action is Action.RESTART:  # of another leader, which didn't know of the first one
                self._outcome = again.outcome
                self._conclude(again)

    def _stop(self, *, well: bool = False) -> None:
        """Stop. ``well``: no rank of this node takes part in what the others run."""
        if self._leaving.signals:
            self._do(effects.TellStop(0))
        self._say_goodbye(self._leaving.take_leave(well=well or self._ended_well))

    def _say_goodbye(self, goodbye: Goodbye) -> None:
        self._move(PhaseEvent.GOODBYE)
        if self._orders.left is None:
            self._do(goodbye)

    def _leave_excluded(self, left: job.Leave | None) -> None:
        """Continue the others without this node, if they are enough; its launcher stays, if there are others."""
        leaving, stuck = self._leaving, self._leaving.stuck
        ends_job = bool(stuck) and self._options.max_nodes == 1
        if left is not None or self._orders.is_left_out:
            reason = f"{stuck} can't be killed, this node leaves the job" if stuck else "this node leaves the job"
            if ends_job:
                reason = f"{stuck} can't be killed, giving up"
            elif not stuck and left is not None and left.code != 0:
                reason = f"{reason}, which ends: {left.text}"
            decision = RestartDecision(action=Action.GIVE_UP, restarts_left=self.restarts_left, reason=reason)
            self._tell_end(decision, leaving.cause)
        if left is not None and ends_job:
            self._over(LauncherExit(Exit.FAILED, 1, verdict=self._orders.verdict))
        elif left is not None:
            # 0: a scheduler that ends the whole job when one node's task fails would undo what was asked for
            over = LauncherExit(Exit.EXCLUDED, 0 if left.code == 0 else 1, left.text)
            self._over(over, left.text if stuck else "")
        elif self._orders.is_left_out:
            self._move(PhaseEvent.LEFT_OUT)
        elif leaving.is_due:
            self._stop(well=True)

    def _over(self, over: LauncherExit, said: str = "") -> None:
        self._move(PhaseEvent.OVER)
        self._do(*self._printer.over(over, self._orders.left, said), over)
