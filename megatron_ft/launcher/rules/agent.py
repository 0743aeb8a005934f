"""The launcher's decisions, without I/O: the life of each cycle on one node, from the node's health to its end.

``handle`` takes an event, the time and the ranks' readings, and returns what is to be done, in order. `FOLLOWS` is the
table of phases; `megatron_ft.launcher` explains them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.messages import (
    Dismiss,
    End,
    Goodbye,
    NodeUnfit,
    Ready,
    Report,
    Shutdown,
    Stay,
    Tell,
    Verdict,
)
from megatron_ft.job.rules.restart_policy import Action, NodeState, Outcome, RestartDecision
from megatron_ft.launcher.rules import conclusion, cycle_lines, events
from megatron_ft.launcher.rules.coordinator_view import CoordinatorView
from megatron_ft.launcher.rules.events import Effect, Exit, LauncherExit, Write
from megatron_ft.launcher.rules.node_cycle import Downtime, NodeCycle
from megatron_ft.launcher.rules.turn import JobLinePrinter, Options, Turn
from megatron_ft.link.base.codec import Parts
from megatron_ft.link.base.control import WorkloadAction, WorkloadControl
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.base.times import earliest
from megatron_ft.link.base.wording import counted
from megatron_ft.link.facts.launcher import (
    Abandoned,
    Cause,
    CauseKind,
    CycleEnded,
    CycleStarted,
    NodeHealth,
    NodeLost,
    RankExited,
    RankStarted,
    StopRequested,
    Stuck,
)
from megatron_ft.records.rules.metrics import NodeActivity

P = TypeVar("P", bound=LauncherPart)
_LONGEST_S = 60.0
"""Longest time between two checks of a node that stands aside."""
_SHOWN = 200
_unlisted: Callable[[str], object] = str


def report_unlisted(report: Callable[[str], object]) -> None:
    """Have events reported that no phase or part takes: a launcher writes them at DEBUG, a test raises."""
    global _unlisted
    _unlisted = report


class AgentPhase(enum.Enum):
    """Phase of the launcher; ``activity``: as metrics show it."""

    def __init__(self, _name: str, activity: NodeActivity) -> None:
        self.activity = activity

    JOINING = "joining", NodeActivity.WAITING
    CHECKING = "checking", NodeActivity.WAITING
    """The health command runs."""
    ASIDE = "aside", NodeActivity.UNFIT
    READY = "ready", NodeActivity.WAITING
    STARTING = "starting", NodeActivity.WAITING
    RUNNING = "running", NodeActivity.TRAINING
    ENDING = "ending", NodeActivity.ENDING
    """Ranks are given time to end by themselves."""
    TERMINATING = "terminating", NodeActivity.ENDING
    JUDGING = "judging", NodeActivity.ENDING
    """Why the cycle has ended isn't known yet."""
    DONE = "done", NodeActivity.ENDED
    """No rank is left, and not all nodes know yet how the job has ended."""
    LEAVING = "leaving", NodeActivity.LEAVING
    """The node has said goodbye, and waits until the others have received it."""
    EXCLUDED = "excluded", NodeActivity.LEAVING
    """The others go on without this node; the launcher waits for the end of the job."""
    OVER = "over", NodeActivity.ENDED


_P = AgentPhase
FOLLOWS = {
    _P.JOINING: {_P.CHECKING, _P.READY, _P.LEAVING, _P.OVER},
    _P.CHECKING: {_P.READY, _P.ASIDE, _P.LEAVING, _P.OVER},
    _P.ASIDE: {_P.CHECKING, _P.LEAVING, _P.OVER},
    _P.READY: {_P.STARTING, _P.LEAVING, _P.OVER},
    _P.STARTING: {_P.RUNNING, _P.JOINING},
    _P.RUNNING: {_P.ENDING},
    _P.ENDING: {_P.TERMINATING},
    _P.TERMINATING: {_P.JUDGING},
    _P.JUDGING: {_P.JOINING, _P.DONE, _P.LEAVING},
    _P.DONE: {_P.JOINING, _P.DONE, _P.LEAVING, _P.OVER},
    _P.LEAVING: {_P.LEAVING, _P.EXCLUDED, _P.OVER},
    _P.EXCLUDED: {_P.LEAVING, _P.OVER},
}
"""Phases that may follow each phase."""


class HealthGate:
    """Checks of this node between two cycles."""

    def __init__(self) -> None:
        self.retry_ns = 0
        """Time of the next check."""
        self.failures = 0
        self._last = ""
        """How the last check failed; empty if it did not."""

    def take_result(self, event: NodeHealth, turn: Turn) -> bool:
        """Log and report the result of a check. Return True if the node is fit."""
        turn.do(Write(event))
        if event.good:
            if self.failures:
                turn.say(f"node health check passed after {counted(self.failures, 'failure')}: joining")
            return True
        self.failures += 1
        if self.failures == 1:
            turn.do(NodeUnfit(event.text))
        delay_s = min(_LONGEST_S, 2.0 ** min(self.failures, 10))
        # ever less often, if it is like the one before
        if event.text != self._last or self.failures & (self.failures - 1) == 0:
            turn.say(f"node health check failed: {_failed(event)}; retrying in {delay_s:g} s")
        self._last, self.retry_ns = event.text, turn.now_ns + round(delay_s * 1e9)
        return False

    def take_result_while_running(self, event: NodeHealth, turn: Turn) -> None:
        """Log and report the result of a check beside ranks, which run on whatever it says."""
        turn.do(Write(event))
        before, self._last = self._last, "" if event.good else event.text
        if event.good and before:
            turn.say("node health check passed again while ranks run")
        elif not event.good and event.text != before:
            turn.say(
                f"node health check failed while ranks run: {_failed(event)}; "
                "ranks run on; the node joins no round while it fails"
            )


def _failed(event: NodeHealth) -> str:
    shown = event.last_line if len(event.last_line) <= _SHOWN else f"{event.last_line[: _SHOWN - 3]}..."
    return f"{event.text} ({shown})" if shown else event.text


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
        self.printer = JobLinePrinter(options)
        self._turn = Turn(now_ns=0, seen=events.Readings({}, {}, {}, {}), printer=self.printer)
        self._health = HealthGate()
        self._next_check_ns: int | None = None
        """Time of the next health check beside ranks."""
        self._cycles = 0
        self._downtime: Downtime | None = None
        self._leaving = conclusion.LeaveReason()
        self._outcome = Outcome.STOPPED
        self._ending: conclusion.RankShutdown | None = None
        self._ending_ns: int | None = None
        self._ended_well = False
        """True if all ranks of the last cycle ended with 0."""
        self._stuck = ""
        """Processes of the node's ranks that can't be killed, in words."""
        self._verdict: Verdict | None = None
        """Verdict by which the last cycle was concluded."""
        for part in parts:
            part.begin(self.cycle, self._turn)

    def handle(self, event: events.Event, now_ns: int, seen: events.Readings) -> list[Effect]:
        """Return what is to be done. At most one effect is an `events.Work`; the next one follows after its result."""
        runs = self.phase in (AgentPhase.STARTING, AgentPhase.RUNNING) and not self._orders.is_over
        turn = self._turn = Turn(
            now_ns=now_ns,
            seen=seen,
            printer=self.printer,
            runs=self.cycle.cycle if runs else None,
            is_ready=self.phase is AgentPhase.READY and not self._orders.has_begun,
        )
        self._turn.do(*self.printer.hear(event))
        self._hear(event)
        if self._downtime is not None and self._downtime.report_end(self.cycle, turn):
            self._downtime = None
        self.cycle.tick(turn)
        for part in self._parts:
            part.tick(turn, is_stopping=bool(self._leaving.signals))
        before = None
        while before is not self.phase:
            before = self.phase
            self._go_on()
        return turn.effects

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

    def _enter(self, phase: AgentPhase) -> None:
        """Enter a phase, if the table lists it after the current one."""
        if phase in FOLLOWS.get(self.phase, ()):
            self.phase = phase
        else:
            _unlisted(f"{self.phase} is not followed by {phase}")

    # -- what happens -----------------------------------------------------------------------------------------

    def _hear(self, event: events.Event) -> None:
        turn, leaving = self._turn, self._leaving
        match event:
            case events.Tick() | Tell():
                pass
            case events.StopAsked():
                self._asked_to_stop(event)
            case events.Continued():
                for part in self._parts:
                    part.continued(turn.now_ns)
            case Abandoned(text=text):
                if not leaving.abandoned:
                    leaving.abandoned = text
                    turn.say(f"{text}: terminating the ranks of this node and leaving the job")
                    turn.write(event)
            case NodeHealth():
                self._checked(event)
            case WorkloadControl():
                self._requested(event)
            case Assignment() | End() | Verdict() | Stay() | Dismiss():
                self._orders.hear(event)
            case NodeLost():
                turn.write(event)
            case _:
                self._hear_of_ranks(event)

    def _asked_to_stop(self, event: events.StopAsked) -> None:
        name, turn = event.number.name, self._turn
        if not self._leaving.signals:
            ranks = len(self.cycle.running) if self.phase is AgentPhase.RUNNING else 0
            turn.say(cycle_lines.asked_to_stop(name=name, ranks=ranks, timeout_s=self._options.given.term_timeout))
            turn.write(StopRequested(signal=name, ranks=ranks))
        self._leaving.asked(event)
        if self.phase is AgentPhase.ENDING and self._ending is not None:
            self._ending.stop_asked([event.number], turn)

    def _hear_of_ranks(self, event: events.Event) -> None:
        turn, cycle = self._turn, self.cycle
        match event:
            case events.RanksMet():
                cycle.met(event, turn.now_ns)
            case events.RanksStarted():
                self._ranks_started()
            case events.NotStarted(cause):
                self._enter(AgentPhase.JOINING if self._leaving.is_due else AgentPhase.RUNNING)
                if cause is not None:
                    self._report(NodeState.UNHEALTHY, cause)
            case events.RanksEnded():
                self._ranks_ended(event)
            case RankStarted():
                cycle.started[event.local_rank] = event
            case RankExited():
                cycle.exited(event, turn)
            case events.MonitorReport(local_rank, report):
                cycle.hear_monitor(local_rank, report, turn)
                for part in self._parts:
                    part.hear_monitor(local_rank, report, turn)
            case _:
                hearers = [part for part in self._parts if isinstance(event, part.HEARS)]
                for part in hearers:
                    part.hear(event, turn)
                if not hearers:
                    _unlisted(f"no part of the launcher takes {event}")

    def _requested(self, request: WorkloadControl) -> None:
        self._turn.write(request)
        if request.action == WorkloadAction.Continue.name or self._orders.taken is None:
            self._turn.say(request.text)
            return
        if request.action == WorkloadAction.ShutdownWorkload.name:
            self.cycle.shutdown_request = self.cycle.shutdown_request or request
            self._turn.do(Shutdown(request.text))
        else:
            self.cycle.exclude_request = self.cycle.exclude_request or request

    def _checked(self, health: NodeHealth) -> None:
        if self.phase is AgentPhase.RUNNING:
            self._health.take_result_while_running(health, self._turn)
            self._plan_check()
        elif self.phase is not AgentPhase.CHECKING:  # this node leaves the job, and has said so
            self._turn.write(health)
        elif self._health.take_result(health, self._turn):
            self._get_ready()
        else:
            self._enter(AgentPhase.ASIDE)

    def _plan_check(self) -> None:
        options, now_ns = self._options, self._turn.now_ns
        interval_s = options.given.node_health_check_interval if options.checks_health else None
        self._next_check_ns = None if interval_s is None else now_ns + round(interval_s * 1e9)

    def _go_on(self) -> None:
        left, ending, turn = self._orders.left, self._ending, self._turn
        match self.phase:
            case AgentPhase.JOINING | AgentPhase.CHECKING | AgentPhase.ASIDE | AgentPhase.READY:
                self._between()
            case AgentPhase.RUNNING:
                self._run()
            case AgentPhase.ENDING if ending is not None and ending.is_over(turn.now_ns):
                self._enter(AgentPhase.TERMINATING)
                self._turn.do(ending.order(turn.now_ns))
            case AgentPhase.JUDGING:
                self._judge()
            case AgentPhase.DONE if self._leaving.signals:
                self._stop()
            case AgentPhase.DONE:
                self._wait_for_the_end()
            case AgentPhase.LEAVING if self._leaving.goodbye is not None and self._leaving.goodbye.excluded:
                self._leave_excluded(left)
            case AgentPhase.LEAVING if left is not None:
                self._over(self._leaving.end())
            case AgentPhase.EXCLUDED if left is not None:
                self._over(LauncherExit(Exit.STAYED, left.code, left.text))
            case AgentPhase.EXCLUDED if self._leaving.is_due:
                self._stop(well=True)

    # -- between cycles ---------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._enter(AgentPhase.JOINING)
        self.joined_ns = self._turn.now_ns
        self._ended_well, self._health = False, HealthGate()

    def _between(self) -> None:
        left = self._orders.left
        is_due = self.phase is AgentPhase.ASIDE and self._turn.now_ns >= self._health.retry_ns
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
        elif self.phase is AgentPhase.JOINING or is_due:
            self._enter(AgentPhase.CHECKING)
            self._turn.do(events.CheckHealth())
        elif self.phase is AgentPhase.READY and self._orders.has_begun:
            decision = self._orders.take().decision
            self._enter(AgentPhase.STARTING)
            self.restarts_left = max(0, self._options.max_restarts - decision.restarts)
            self.cycle = NodeCycle(decision, self._parts, now_ns=self._turn.now_ns)
            for part in self._parts:
                part.begin(self.cycle, self._turn)
            self._turn.do(events.StartRanks(decision))

    def _get_ready(self) -> None:
        self._enter(AgentPhase.READY)
        self._health = HealthGate()
        if not self._orders.has_begun:
            self._tell_ready()

    def _tell_ready(self) -> None:
        self._turn.do(Ready(Parts(*(state for part in self._parts for state in part.status()))))

    # -- a cycle ----------------------------------------------------------------------------------------------

    def _ranks_started(self) -> None:
        self._enter(AgentPhase.RUNNING)
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
            self._end_ranks(Outcome.STOPPED)
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
                self._turn.do(events.CheckHealth())

    def _report(self, state: NodeState, cause: Cause | None = None) -> None:
        """Report this node's state once, and again if it follows no longer from another node's, or a rank is mixed.

        A cycle whose successor has begun needs no report any more.
        """
        orders, told, is_mixed = self._orders, self._orders.told, self.cycle.mixed is not None
        is_known = told is not None and told.state is state and is_mixed <= told.is_mixed
        if orders.has_begun or (is_known and told is not None and not told.cause.follows):
            return
        cycle, seen, now = self.cycle, self._turn.seen, Report(self.cycle.cycle, state)
        if state is not NodeState.SUCCEEDED:
            why = cause or cycle.mixed or cycle.own_failure(seen) or cycle.cause()
            told_cause = replace(why, text=why.line, iteration=None, detail="")
            ranks = 0 if why.rerun is None else len(cycle.ranks)
            now = Report(cycle.cycle, state, told_cause, cycle.reached(seen, why), ranks=ranks, is_mixed=is_mixed)
        if not (is_known and now.cause.follows):
            orders.told = now
            self._turn.do(now)
            is_news = now.state is NodeState.UNHEALTHY and not now.cause.follows and not orders.is_over
            if is_news and not self.printer.speaks:  # another launcher prints why the cycle ended
                self._turn.say(f"cycle {now.cycle}: {now.cause.text}")

    def _report_own_failure(self) -> None:
        """Report why the cycle has failed, maybe because others have lost a rank of this node that is slow to end."""
        cause = None if self._options.min_healthy else self.cycle.own_failure(self._turn.seen)
        if self._outcome is Outcome.FAILED and cause is not None:
            self._report(NodeState.UNHEALTHY, cause)

    # -- its end ----------------------------------------------------------------------------------------------

    def _end_ranks(self, outcome: Outcome) -> None:
        """End the ranks of this node."""
        self._enter(AgentPhase.ENDING)
        self._outcome, self._ending_ns = outcome, self._turn.now_ns
        if outcome is Outcome.EXCLUDED:
            self._report(NodeState.EXCLUDED, self.cycle.request_cause())
        for part in self._parts:
            part.ending(self._turn)
        self._report_own_failure()
        self._ending = conclusion.RankShutdown(
            self._options, self.cycle, outcome, self._orders, self._leaving, self._turn
        )

    def _ranks_ended(self, event: events.RanksEnded) -> None:
        self._enter(AgentPhase.JUDGING)
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

    def _judge(self) -> None:
        """Conclude the cycle by the leader's verdict, unless this node leaves; once it is known, or none can come."""
        orders, is_due = self._orders, self._leaving.is_due
        if self._outcome is Outcome.EXCLUDED or (self._outcome is Outcome.STOPPED and is_due):
            self._conclude(None)
        elif orders.is_lost or orders.verdict is not None or orders.left is not None or is_due:
            self._conclude(orders.verdict)

    def _conclude(self, verdict: Verdict | None) -> None:
        cycle, orders, leaving = self.cycle, self._orders, self._leaving
        self._verdict = verdict
        if self._outcome in (Outcome.FAILED, Outcome.MEMBERSHIP):  # requests of ranks that arrived last
            if cycle.shutdown_request is not None:
                self._outcome = Outcome.STOPPED
            elif cycle.exclude_request is not None:
                self._outcome = Outcome.EXCLUDED
        if self._outcome is Outcome.SUCCEEDED:
            self._tell_end(RestartDecision(action=Action.FINISH, restarts_left=self.restarts_left, reason=""), None)
            self._finish_part()
            return
        if self._outcome is Outcome.EXCLUDED:
            self._say_goodbye(leaving.leave_out(cycle.request_cause(), ""))
            return
        decision, cause = self._decision(verdict)
        if self._stuck and decision.action is Action.RESTART:
            # new ranks would need what the stuck processes hold: devices, memory, ports
            self._say_goodbye(leaving.leave_out(cause, self._stuck))
            return
        if verdict is not None and verdict.node == orders.place:
            for part in self._parts:
                part.blamed(cause, self._turn)
        self._tell_end(decision, cause)
        if leaving.is_due:
            self._stop()
        elif decision.action is Action.GIVE_UP:
            self._finish_part()
        else:
            self._join()

    def _decision(self, verdict: Verdict | None) -> tuple[RestartDecision, Cause]:
        """Return the decision after a cycle that hasn't ended well, and its cause.

        ``verdict``: the coordinator's, the same on all nodes; None if this node has left, or the others have lost it.
        """
        cycle, orders, leaving = self.cycle, self._orders, self._leaving
        stops = RestartDecision(action=Action.GIVE_UP, restarts_left=self.restarts_left, reason="not restarting")
        if verdict is not None:
            if self._outcome is Outcome.STOPPED and cycle.shutdown_request is not None:
                return stops, cycle.request_cause()
            decision, told = verdict.decision, orders.told
            if decision.action is Action.RESTART and leaving.is_due:
                decision = replace(decision, action=Action.GIVE_UP, reason=stops.reason)
            if verdict.node == orders.place and told is not None and verdict.cause.text == told.cause.text:
                # this node has reported it, and knows more
                if cycle.failed:
                    return decision, replace(cycle.cause(), host=verdict.cause.host)
            return decision, verdict.cause_for(orders.place)
        if leaving.signals:
            text = cycle_lines.stopped(leaving.signals[0].name, cycle.failures())
            return stops, Cause(kind=CauseKind.REQUEST, text=text)
        if leaving.abandoned:
            return stops, Cause(text=leaving.abandoned)
        if orders.left is not None:
            return replace(stops, reason=""), Cause(text=orders.lost or orders.left.text or "the job has ended")
        if orders.is_cut_off:
            return replace(stops, action=Action.RESTART, reason="reconnecting to the job"), Cause(text=orders.lost)
        cause = Cause(text=cycle_lines.taken_for_lost(orders.lost))
        return replace(stops, action=Action.RESTART, reason="on standby"), cause

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
            is_own = self._verdict is None or self._leaving.is_due or self._leaving.goodbye is not None
            self._turn.do(*([Tell(line)] if is_own else self.printer.for_all(line, ends_cycle=True)))
        self._turn.do(Write(ended))

    # -- the end of this launcher's part ------------------------------------------------------------------------

    def _finish_part(self) -> None:
        self._enter(AgentPhase.DONE)
        if self._orders.left is None:
            self._tell_ready()

    def _wait_for_the_end(self) -> None:
        """Stay until every node knows how the job has ended; a coordinator that hasn't received that may go on."""
        verdict, orders, left = self._verdict, self._orders, self._orders.left
        cause = None if self.ended is None else self.ended.cause
        if left is not None and cause is None:
            text = "" if verdict is None else verdict.cause.text
            over = LauncherExit(Exit.SUCCEEDED, 0, verdict=verdict)
            self._over(over, text or f"all ranks finished after {counted(self._cycles, 'cycle')}")
        elif left is not None and verdict is None:
            self._over(LauncherExit(Exit.LEFT, left.code, "" if cause and left.text == cause.text else left.text))
        elif left is not None and verdict is not None:
            # ranks of this node may be why the job gives up; with min-healthy that takes several nodes
            is_ours = verdict.cause.rank in self.cycle.ranks or verdict.node == orders.place
            if self._options.min_healthy:
                is_ours = orders.told is not None and orders.told.state is NodeState.UNHEALTHY
            is_ours = is_ours and bool(self.cycle.failed) and verdict.outcome is not Outcome.STOPPED
            self._over(LauncherExit(Exit.FAILED, left.code or 1, verdict=verdict, cause=cause if is_ours else None))
        elif orders.has_begun:
            self._join()
        elif (again := orders.verdict) is not None and again != verdict and again.decision.action is Action.RESTART:
            self._outcome = again.outcome  # of another leader, which didn't know of the first one
            self._conclude(again)

    def _stop(self, *, well: bool = False) -> None:
        """Stop. ``well``: no rank of this node takes part in what the others run."""
        leaving, well = self._leaving, well or self._ended_well
        text = f"its launcher received {leaving.signals[0].name}" if leaving.signals else leaving.abandoned
        leaving.goodbye = Goodbye(text, code=0 if well and leaving.signals else 1, failed=not leaving.signals)
        self._say_goodbye(leaving.goodbye)

    def _say_goodbye(self, goodbye: Goodbye) -> None:
        self._enter(AgentPhase.LEAVING)
        if self._orders.left is None:
            self._turn.do(goodbye)

    def _leave_excluded(self, left: Dismiss | None) -> None:
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
            self._enter(AgentPhase.EXCLUDED)
        elif leaving.is_due:
            self._stop(well=True)

    def _over(self, over: LauncherExit, said: str = "") -> None:
        self._enter(AgentPhase.OVER)
        self._turn.do(*self.printer.over(over, self._orders.left, said), over)
