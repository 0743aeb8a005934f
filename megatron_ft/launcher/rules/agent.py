"""The launcher's decisions, without I/O: the life of each cycle on one node, from the node's health to its end.

``handle`` takes an event, the time and the ranks' readings, and returns what is to be done, in order.
`docs/design/agent.md` lists the phases and their transitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from signal import Signals
from typing import TypeVar

from megatron_ft.job.rules import actions as job
from megatron_ft.job.rules.actions import Say
from megatron_ft.job.rules.messages import End, Goodbye, Ready, Shutdown, Verdict
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome, RestartDecision
from megatron_ft.launcher.rules import cycle_lines, effects, events
from megatron_ft.launcher.rules.conclusion import EndOfCycle, LeaveReason, report
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView
from megatron_ft.launcher.rules.effects import Effect, Exit, LauncherExit, Write
from megatron_ft.launcher.rules.health import HealthGate
from megatron_ft.launcher.rules.job_line_printer import JobLinePrinter
from megatron_ft.launcher.rules.node_cycle import Downtime, NodeCycle
from megatron_ft.launcher.rules.phases import TRANSITIONS, AgentPhase, PhaseEvent
from megatron_ft.launcher.rules.rank_shutdown import RankShutdown
from megatron_ft.launcher.rules.turn import Options, Turn
from megatron_ft.link.base import state_table
from megatron_ft.link.base.control import WorkloadAction, WorkloadControl
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.base.times import earliest
from megatron_ft.link.facts.launcher import (
    Abandoned,
    Cause,
    CycleEnded,
    CycleStarted,
    NodeHealth,
    NodeLost,
    RankExited,
    RankStarted,
    Stuck,
)
from megatron_ft.records.rules.metrics import NodeActivity

P = TypeVar("P", bound=LauncherPart)


class Agent:
    """State machine of one launcher. ``parts``: its capabilities, by the order in which they take an event."""

    def __init__(
        self, options: Options, parts: Sequence[LauncherPart] = (), orders: CoordinatorView | None = None
    ) -> None:
        self.phase = AgentPhase.JOINING
        self.cycle = NodeCycle(None, parts, now_ns=0)
        """Cycle that is about to start, or runs, or has ended last."""
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
        self._parts = parts
        self._orders = orders or CoordinatorView()
        self._printer = JobLinePrinter(says_all=options.says_all, shares_output=options.shares_output)
        self._turn = Turn(now_ns=0, seen=events.Readings({}, {}, {}, {}), printer=self._printer)
        self._health = HealthGate()
        self._next_check_ns: int | None = None
        """Time of the next health check beside ranks."""
        self._cycles = 0
        self._downtime: Downtime | None = None
        self._leaving = LeaveReason()
        self._outcome = Outcome.STOPPED
        self._ending: RankShutdown | None = None
        self._ending_ns: int | None = None
        self._ended_well = False
        """True if all ranks of the last cycle ended with 0."""
        self._stuck = ""
        """Processes of the node's ranks that can't be killed, in words."""
        self._known: EndOfCycle | None = None
        for part in parts:
            part.begin(self.cycle, self._turn)

    def handle(self, event: events.Event, now_ns: int, seen: events.Readings) -> list[Effect]:
        """Return what is to be done. At most one effect is an `effects.Work`; the next one follows after its result."""
        runs = self.phase in (AgentPhase.STARTING, AgentPhase.RUNNING) and not self._orders.is_over
        self._turn = Turn(
            now_ns=now_ns,
            seen=seen,
            printer=self._printer,
            runs=self.cycle.cycle if runs else None,
            is_ready=self.phase is AgentPhase.READY and not self._orders.has_begun,
        )
        self._do(*self._printer.hear(event))
        self._hear(event)
        self.cycle.tick(self._turn)
        for part in self._parts:
            part.tick(self._turn, is_stopping=bool(self._leaving.signals))
        before = None
        while before is not self.phase:
            before = self.phase
            self._go_on()
        return self._turn.effects

    @property
    def alarm_ns(self) -> int | None:
        """Latest time of the next `Tick`."""
        times = [self.cycle.alarm_ns(self._turn.now_ns), *(part.alarm_ns for part in self._parts)]
        if self.phase is AgentPhase.ASIDE:
            times.append(self._health.retry_ns)
        elif self.phase is AgentPhase.RUNNING:
            times.append(self._next_check_ns)
        elif self.phase is AgentPhase.ENDING and self._ending is not None:
            times.append(self._ending.alarm_ns)
        return earliest(*times)

    @property
    def is_spokesman(self) -> bool:
        """True if this launcher alone speaks for the job."""
        return self._printer.is_spokesman

    @property
    def activity(self) -> NodeActivity:
        """State of the node for metrics."""
        waits = self.phase in (AgentPhase.JOINING, AgentPhase.CHECKING, AgentPhase.READY)
        return NodeActivity.STANDBY if waits and self._orders.stands_by else self.phase.activity

    @property
    def wants_ranks(self) -> bool:
        """True while ranks that are about to be started are still wanted."""
        return self.phase is AgentPhase.STARTING and not (self._orders.is_over or self._leaving.is_due)

    def part(self, kind: type[P]) -> P | None:
        """Return the part of that kind; None without one."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def _move(self, event: PhaseEvent) -> None:
        """Enter the phase that the table names."""
        self.phase = state_table.follow(TRANSITIONS, self.phase, event)

    def _do(self, *effects: Effect) -> None:
        self._turn.do(*effects)

    # -- what happens -----------------------------------------------------------------------------------------

    def _hear(self, event: events.Event) -> None:
        turn = self._turn
        match event:
            case events.StopAsked():
                self._leaving.asked(event)
                if self.phase is AgentPhase.ENDING and self._ending is not None:
                    self._ending.stop_asked([event.number], self._leaving.hurry, turn)
            case events.Continued():
                for part in self._parts:
                    part.continued(turn.now_ns)
            case Abandoned(text=text) if not self._leaving.abandoned:
                self._leaving.asked(event)
                turn.say(f"{text}: terminating the ranks of this node and leaving the job")
                turn.write(event)
            case NodeHealth():
                self._checked(event)
            case WorkloadControl():
                self._requested(event)
            case job.Begin() | job.StandBy() | End() | Verdict() | job.LeftOut() | job.Leave():
                self._orders.hear(event)
            case NodeLost():
                turn.write(event)
            case _:
                self._hear_of_ranks(event)
        if self._downtime is not None and self._downtime.report_end(self.cycle, turn):
            self._downtime = None

    def _hear_of_ranks(self, event: events.Event) -> None:
        turn = self._turn
        match event:
            case events.RanksMet():
                self.cycle.met(event, turn.now_ns)
            case events.RanksStarted():
                self._ranks_started()
            case events.NotStarted(cause):
                self._move(PhaseEvent.START_GIVEN_UP if self._leaving.is_due else PhaseEvent.NOT_STARTED)
                if cause is not None:
                    self._report(NodeState.UNHEALTHY, cause)
            case events.RanksEnded():
                self._ranks_ended(event)
            case RankStarted():
                self.cycle.started[event.local_rank] = event
            case RankExited():
                self.cycle.exited(event, turn)
            case events.MonitorReport(local_rank, report):
                self.cycle.hear_monitor(local_rank, report, turn)
                for part in self._parts:
                    part.hear_monitor(local_rank, report, turn)
            case events.Tick() | job.PrintsJobLines() | Abandoned():
                pass
            case _:
                self._hear_by_parts(event)

    def _hear_by_parts(self, event: events.Event) -> None:
        hearers = [part for part in self._parts if isinstance(event, part.HEARS)]
        for part in hearers:
            part.hear(event, self._turn)
        if not hearers:
            state_table.unlisted(f"no part of the launcher takes {event}")

    def _checked(self, health: NodeHealth) -> None:
        if self.phase is AgentPhase.RUNNING:
            self._health.take_result_while_running(health, self._turn)
            self._plan_check()
        elif self.phase is not AgentPhase.CHECKING:  # this node leaves the job, and has said so
            self._turn.write(health)
        elif self._health.take_result(health, self._turn):
            self._get_ready()
        else:
            self._move(PhaseEvent.UNFIT)

    def _plan_check(self) -> None:
        interval_s, now_ns = self._options.health_interval_s, self._turn.now_ns
        self._next_check_ns = None if interval_s is None else now_ns + round(interval_s * 1e9)

    def _requested(self, request: WorkloadControl) -> None:
        self._turn.write(request)
        if request.action == WorkloadAction.Continue.name or self._orders.taken is None:
            self._turn.say(request.text)
            return
        self.cycle.requested(request)
        if request.action == WorkloadAction.ShutdownWorkload.name:
            self._do(Shutdown(request.text, request.rank))

    def _go_on(self) -> None:
        left = self._orders.left
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
                self._leave_excluded(left)
            case AgentPhase.LEAVING if left is not None:
                self._over(self._leaving.over())
            case AgentPhase.EXCLUDED if left is not None:
                self._over(LauncherExit(Exit.STAYED, left.code, left.text))
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
            over = LauncherExit(Exit.FAILED, 1, left.text, self._orders.verdict)
            self._over(over, f"{left.text}; the job ends")
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
            decision = self._orders.take().decision
            self._move(PhaseEvent.BEGIN)
            self.restarts_left = max(0, self._options.max_restarts - decision.restarts)
            self.cycle = NodeCycle(decision, self._parts, now_ns=self._turn.now_ns)
            for part in self._parts:
                part.begin(self.cycle, self._turn)
            self._do(effects.StartRanks(self.restarts_left, decision))

    def _get_ready(self) -> None:
        self._move(PhaseEvent.FIT)
        self._health = HealthGate()
        if not self._orders.has_begun:
            self._tell_ready()

    def _tell_ready(self) -> None:
        self._do(Ready(**{name: value for part in self._parts for name, value in part.status().items()}))

    # -- a cycle ----------------------------------------------------------------------------------------------

    def _ranks_started(self) -> None:
        self._move(PhaseEvent.STARTED)
        self._plan_check()
        cycle = self.started = self.cycle
        self.ended = None
        for part in self._parts:
            part.started(self._turn)
        self._turn.say_for_all(cycle_lines.cycle_started(cycle.cycle, cycle.world_size, cycle.ranks, cycle.nodes))
        started = CycleStarted(
            cycle=cycle.cycle,
            ranks=tuple(cycle.started.values()),
            group_rank=cycle.place,
            world_size=cycle.world_size,
            max_restarts=self._options.max_restarts,
            restarts_left=self.restarts_left,
            back=() if cycle.decision is None else cycle.decision.back,
            begun_ns=cycle.begun_ns,
            met_ns=cycle.met_ns,
            spawned_ns=cycle.spawned_ns,
        )
        self._turn.write(started)

    def _run(self) -> None:
        if self._leaving.signals:
            self._end_ranks(Outcome.STOPPED, signals=self._leaving.signals)
        elif self._leaving.abandoned:
            self._report(NodeState.LOST, Cause(text=self._leaving.abandoned))
            self._end_ranks(Outcome.STOPPED)
        elif self.cycle.exclude_request is not None:
            self._end_ranks(Outcome.EXCLUDED)
        else:
            state = self.cycle.state(self._turn)
            if state is not NodeState.HEALTHY:
                self._report(state)
            if self._orders.is_over:
                self._end_ranks(self._orders.outcome)
            elif self._next_check_ns is not None and self._turn.now_ns >= self._next_check_ns:
                self._next_check_ns = None
                self._do(effects.CheckHealth())

    def _report(self, state: NodeState, cause: Cause | None = None) -> None:
        if self._orders.may_be_news(state, is_mixed=self.cycle.mixed is not None):
            now = report(self.cycle, state, cause, self._turn.seen)
            if self._orders.report(now):
                self._do(now, *([] if self._orders.is_over else self._printer.failed(now)))

    def _report_own_failure(self) -> None:
        """Report why the cycle has failed, maybe because others have lost a rank of this node that is slow to end."""
        cause = None if self._options.min_healthy else self.cycle.own_failure(self._turn.seen)
        if self._outcome is Outcome.FAILED and cause is not None:
            self._report(NodeState.UNHEALTHY, cause)

    # -- its end ----------------------------------------------------------------------------------------------

    def _end_ranks(self, outcome: Outcome, signals: Sequence[Signals] = ()) -> None:
        """End the ranks of this node; ``signals`` are those that asked for it."""
        self._move(PhaseEvent.CYCLE_ENDS)
        self._outcome, self._ending_ns = outcome, self._turn.now_ns
        if outcome is Outcome.EXCLUDED:
            self._report(NodeState.EXCLUDED, self.cycle.request_cause())
        for part in self._parts:
            part.ending(self._turn)
        self._report_own_failure()
        if signals:
            self._do(effects.TellStop(len(self.cycle.running)))
        end = self._orders.end
        self._ending = RankShutdown(self._options, self.cycle, outcome, end, self._turn, by_signals=bool(signals))
        self._ending.stop_asked(self._leaving.signals, self._leaving.hurry, self._turn)

    def _ranks_ended(self, event: events.RanksEnded) -> None:
        self._move(PhaseEvent.RANKS_ENDED)
        cycle = self.cycle
        cycle.read_late_words(self._turn, waits=False)
        self._ended_well, self._cycles = cycle.all_have_ended and not cycle.failed, self._cycles + 1
        self._report_own_failure()
        stops_alone = self._outcome is Outcome.STOPPED and not self._leaving.is_due and cycle.nodes == 1
        if stops_alone and self._ended_well:
            self._outcome = Outcome.SUCCEEDED  # the request to end came from a job that was at its end
        self._stuck = "" if self._outcome is Outcome.SUCCEEDED else event.stuck
        if self._stuck:
            self._turn.write(Stuck(cycle=cycle.cycle, processes=tuple(event.processes)))

    def _wait_for_verdict(self) -> None:
        """Wait for the verdict on the cycle; none comes if this node leaves, or the others have lost it."""
        orders = self._orders
        leaves = self._outcome is Outcome.EXCLUDED or (self._outcome is Outcome.STOPPED and self._leaving.is_due)
        if leaves:
            self._conclude(None)
        elif orders.is_lost or orders.verdict is not None or orders.left is not None or self._leaving.is_due:
            self._conclude(orders.verdict)

    def _conclude(self, verdict: Verdict | None) -> None:
        cycle, orders = self.cycle, self._orders
        if self._outcome in (Outcome.FAILED, Outcome.MEMBERSHIP):  # requests of ranks that arrived last
            if cycle.shutdown_request is not None:
                self._outcome = Outcome.STOPPED
            elif cycle.exclude_request is not None:
                self._outcome = Outcome.EXCLUDED
        known = self._known = EndOfCycle(cycle, orders, verdict, self._leaving, self.restarts_left)
        if self._outcome is Outcome.SUCCEEDED:
            self._tell_end(RestartDecision(action=Action.FINISH, restarts_left=self.restarts_left, reason=""), None)
            self._finish_part()
            return
        if self._outcome is Outcome.EXCLUDED:
            self._say_goodbye(self._leaving.leave_out(cycle.request_cause(), ""))
            return
        if self._leaving.signals:
            self._do(effects.TellStop(0))
        decision, cause = known.conclude(self._outcome)
        if self._stuck and decision.action is Action.RESTART:
            # new ranks would need what the stuck processes hold: devices, memory, ports
            self._say_goodbye(self._leaving.leave_out(cause, self._stuck))
            return
        if verdict is not None and verdict.node == orders.place:
            for part in self._parts:
                part.blamed(cause, self._turn)
        self._tell_end(decision, cause)
        if self._leaving.is_due:
            self._stop()
        elif decision.action is Action.GIVE_UP:
            self._finish_part()
        else:
            self._do(effects.CycleRetrying())
            self._join()

    def _tell_end(self, decision: RestartDecision, cause: Cause | None) -> None:
        cycle, last = self.cycle, self.cycle.last_iteration(self._turn.seen)
        ended = self.ended = CycleEnded(
            cycle=cycle.cycle,
            outcome=self._outcome.value,
            cause=cause,
            action=decision.action.value,
            iteration=last if cause is None or cause.iteration is None else cause.iteration,
            restarts_left=decision.restarts_left,
            noticed_ns=cycle.noticed_ns(),
            ending_ns=self._ending_ns,
        )
        if cause is not None:
            self.failed = ended
            self._downtime = Downtime(cycle, self._turn)
            line = cycle_lines.cycle_ended(cycle.cycle, cause, decision, self._outcome, self._options.max_restarts)
            # for this node alone, as far as it knows: no other node explains it
            known, leaving = self._known, self._leaving
            is_own = known is None or known.verdict is None or leaving.is_due or leaving.goodbye is not None
            self._do(*([Say(line)] if is_own else self._printer.for_all(line, ends_cycle=True)))
        self._do(Write(ended))

    # -- the end of this launcher's part ------------------------------------------------------------------------

    def _finish_part(self) -> None:
        self._move(PhaseEvent.NO_RESTART)
        if self._orders.left is None:
            self._tell_ready()

    def _wait_for_the_end(self) -> None:
        """Stay until every node knows how the job has ended; a coordinator that hasn't received that may go on."""
        known, left = self._known, self._orders.left
        assert known is not None
        cause = None if self.ended is None else self.ended.cause
        if left is not None and cause is not None:
            self._over(known.finish(cause, left, is_min_healthy=self._options.min_healthy))
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
