"""One cycle as the leader sees it: the states of its nodes, how it ended, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from megatron_ft.exit_codes import NO_PROGRESS_CODE
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.decisions import Decision
from megatron_ft.job.rules.liveness import FINISHED_S, excused_s, lost_s, stall_s
from megatron_ft.job.rules.messages import End, Goodbye, NodeStatus, Report, Verdict
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import Action, JobProgress, NodeState, Outcome, Reached, Rotation, Rules
from megatron_ft.link.base.rerun import WANTS_ANOTHER_GPU, Rerun
from megatron_ft.link.base.times import earliest
from megatron_ft.link.base.wording import counted
from megatron_ft.link.facts.launcher import Cause, CauseKind, NodeLost

_FAREWELL_S = 3.0
"""How long to wait after a node has left whose ranks had all exited with 0: the others may be doing the same."""
_CAUSE_S = 0.3
"""Seconds to wait for the cause after a failure that is only a consequence."""
RERUN_S = 3.0
"""Seconds to wait for the report of the rank whose result Megatron's rerun state machine rejected."""
GOOD = (NodeState.HEALTHY, NodeState.SUCCEEDED)
GONE = (NodeState.LOST, NodeState.EXCLUDED)
_FINAL = (NodeState.SUCCEEDED, NodeState.EXCLUDED)
"""States a node reaches by itself; the later end of its launcher changes nothing."""
_LIKELY = (NodeState.UNHEALTHY, NodeState.LOST, NodeState.EXCLUDED)
"""Which of several nodes ended a cycle: launchers may end with their ranks, and an exclusion costs no restart."""
_CHANGES = {
    Rotation.RANKS: "ranks are rotated by one within each node",
    Rotation.NODES: "nodes are rotated by one place",
    Rotation.NONE: "no rank can change places with it, so that the same GPU runs it again",
}


@dataclass(frozen=True, slots=True)
class Hold:
    """A part may know more until then: the cycle isn't concluded before."""

    until_s: float


@dataclass(frozen=True, slots=True)
class PartVerdict:
    """A part ends the cycle.

    Args:
        place: of the node that has reported what ended it.
        reached: how far the cycle got; None if the part doesn't know.
        cause: why; None if the report of that node says so.
        is_weak: that of a node which has failed by itself explains more than ``cause``.
    """

    outcome: Outcome
    place: int
    reached: Reached | None = None
    cause: Cause | None = None
    is_weak: bool = False


@dataclass(slots=True)
class Seat:
    """A place in a cycle, its node, and how that stands."""

    report: Report
    node: Node
    leaving: str = ""
    """Its node has said farewell, and why; all its ranks had ended with 0."""

    @property
    def state(self) -> NodeState:
        return self.report.state

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def has_finished(self) -> bool:
        return self.state is NodeState.SUCCEEDED or bool(self.leaving)

    def change(self, report: Report) -> bool:
        """Take a report; return False if it says nothing new."""
        is_telling = (self.report.cause.follows and not report.cause.follows) or report.is_mixed > self.report.is_mixed
        if self.state in _FINAL or (report.state is self.state and not is_telling):
            return False
        self.report = report
        return True


class JobCycle:
    """``nodes`` by place. Times are seconds of the leader's own clock."""

    def __init__(self, rules: Rules, decision: Decision, nodes: Iterable[Node]) -> None:
        self.rules, self.decision = rules, decision
        healthy = Report(decision.cycle, NodeState.HEALTHY)
        self.seats = [Seat(healthy, node) for node in nodes]
        self.outcome: Outcome | None = None
        self.verdict: Verdict | None = None
        self.shutdown: tuple[int | None, str] | None = None
        """The first request for the end of the job: from which node, and its words."""
        self.decided_by: int | None = None
        self.judged: tuple[Outcome, int] | None = None
        """How the reports of its nodes have ended it, and the place of the last of these."""
        self.found: PartVerdict | None = None
        self.joining = 0
        self.has_restored = False
        """Its ranks go on from a snapshot in memory."""
        self.has_snapshot = False
        """All its ranks have kept their state, so that they were through their start."""
        self.gone: set[int] = set()
        """Places whose nodes have left or were lost, during the cycle or after its end."""
        self.alarm_s: float | None = None
        """When to call ``conclude`` and ``judge`` again, at the latest."""
        # news for the users, until they are told
        self.changes: list[int] = []
        """Places whose nodes have changed their state while the cycle ran."""
        self.losses: list[tuple[int, Report]] = []
        """Places of nodes lost after the end of the cycle."""
        self.departures: list[NodeLost] = []
        """Nodes that have left without being asked to."""
        self._counts = Counter(seat.state for seat in self.seats)
        self.is_news = False
        """A launcher has reported how the cycle ended, which others may not know."""
        self._ended_s = 0.0
        self._farewell_s: float | None = None
        self._ends_with: int | None = None
        """Place of the launcher that holds the lock, if it was asked to stop."""
        self._reached: Reached | None = None
        self._longest_gap_s: float | None = None
        """From one progress of a node to its next; None before the first progress."""

    # -- reports of its nodes ---------------------------------------------------------------------------------

    def restored(self, place: int, standing: NodeStatus, now_s: float) -> None:
        """Take over what a launcher reports of this cycle to a leader that may not know it."""
        if standing.cycle != self.decision.cycle:
            return
        if standing.report is not None:
            self.changed(place, standing.report)
        if standing.ended is not None and self.outcome is None:
            self.outcome, self._ended_s, self.is_news = standing.ended, now_s, True
        if self.verdict is None and standing.verdict is not None:
            self.verdict, self.is_news = standing.verdict, True

    def changed(self, place: int, report: Report) -> None:
        """A node reports another state."""
        seat = self.seats[place]
        if report.cycle != self.decision.cycle:
            return
        is_gone = report.state in GONE
        if is_gone and place not in self.gone:
            self.gone.add(place)
            if report.state is NodeState.EXCLUDED or report.cause.kind is CauseKind.MEMBERSHIP:
                self.departures.append(NodeLost(cycle=report.cycle, node=seat.name, text=report.cause.text))
        has_ended_it = self.judged == (Outcome.FAILED, place) and not seat.report.cause.follows
        if report.state is NodeState.EXCLUDED and has_ended_it:
            report = replace(seat.report, state=NodeState.EXCLUDED)  # the failure came first, and costs a restart
        if self.outcome is not None:
            is_listed = self.verdict is None and self.rules.min_healthy  # by the verdict
            if is_gone and seat.state not in GONE and not is_listed:
                self.losses.append((place, report))
            if self.verdict is None and not report.cause.follows and report.state is not NodeState.SUCCEEDED:
                seat.change(report)  # its report took longer than those of the nodes that failed because of it
            return
        before = seat.state
        if seat.change(report):
            self._counts[before] -= 1
            self._counts[report.state] += 1
            self.changes.append(place)
            judged = Outcome.FAILED if report.is_mixed else self.rules.judge(self._counts)
            if self.judged is None and judged is not None:
                self.judged = judged, place

    def lose(self, place: int, text: str) -> None:
        """Count the node at that place as lost."""
        self.changed(place, Report(self.decision.cycle, NodeState.LOST, Cause(text=text)))

    def finish_without(self, place: int, text: str, now_s: float) -> None:
        """End the cycle as one that has finished: all other nodes have, and this one has been silent for long."""
        if self.outcome is None:
            self.seats[place].change(Report(self.decision.cycle, NodeState.LOST, Cause(text=text)))
            self.outcome, self._ended_s, self.is_news = Outcome.SUCCEEDED, now_s, True

    def progressed(self, node: Node, at_s: float) -> None:
        """Note the time of the last progress of a node's ranks, as a beat of its launcher tells it."""
        if self.place_of(node) is not None:
            gap_s = 0.0 if node.progress_s is None else at_s - node.progress_s
            node.progress_age_s = node.heard_s - at_s
            node.progress_s, self._longest_gap_s = at_s, max(self._longest_gap_s or 0.0, gap_s)

    def excused_s(self, now_s: float) -> float:
        """Return the seconds for which one of the nodes may be silent before it counts as lost."""
        world = len(self.seats)
        if self.outcome is not None:
            return lost_s(world)
        unfinished = [seat for seat in self.seats if seat.state not in (NodeState.LOST, NodeState.SUCCEEDED)]
        here = [seat for seat in unfinished if seat.node.link is not None]
        heard = [seat for seat in here if now_s - seat.node.heard_s < lost_s(world)]
        if not heard and self.count(NodeState.SUCCEEDED):
            return FINISHED_S
        going = set()
        if self._longest_gap_s is not None and not self.rules.min_healthy:
            limit_s = stall_s(world, self._longest_gap_s)
            # without a node that is heard of, this leader may be the one that is cut off
            ages_s = [seat.node.progress_age_s for seat in heard or unfinished]
            going = {age_s is not None and age_s < limit_s for age_s in ages_s}
        return excused_s(world, going, untold_s=self.rules.node_lost_s)

    def farewell(self, place: int, goodbye: Goodbye, now_s: float, *, ends_job: bool = False) -> None:
        """The node at that place leaves the job. ``ends_job``: its launcher holds the lock: the job ends, too."""
        if goodbye.well and not goodbye.excluded and self.outcome is None:
            # the others may have been asked to end, too: then the job has ended as it was asked to
            self.gone.add(place)
            self.seats[place].leaving = goodbye.text
            self._farewell_s, self._ends_with = now_s + _FAREWELL_S, place if ends_job else self._ends_with
        elif ends_job:
            self.asked_to_end(place, goodbye.text)
        else:
            state = NodeState.EXCLUDED if goodbye.excluded else NodeState.LOST
            kind = CauseKind.MEMBERSHIP if goodbye.failed else CauseKind.REQUEST
            self.changed(place, Report(self.decision.cycle, state, Cause(kind=kind, text=goodbye.text)))

    def asked_to_end(self, place: int | None, text: str) -> None:
        """A rank of that node has requested the end of the job, with these words; the first request counts."""
        self.shutdown = self.shutdown or (place, text)

    # -- questions about its nodes ----------------------------------------------------------------------------

    def count(self, *states: NodeState) -> int:
        """Return the number of nodes in one of these states."""
        return sum(self._counts[state] for state in states)

    def place_of(self, node: Node) -> int | None:
        """Return the place of a launcher in this cycle, lost or not. ``node.place`` may be one of another cycle."""
        place = node.place
        has_it = place is not None and place < len(self.seats) and self.seats[place].node is node
        return place if has_it else None

    @property
    def healthy(self) -> list[int]:
        """Places of the nodes whose ranks run, as far as is known."""
        return [place for place, seat in enumerate(self.seats) if seat.state is NodeState.HEALTHY]

    def links(self) -> dict[int, int]:
        """Return connections of the launchers that take part in this cycle, by place."""
        return {
            place: seat.node.link
            for place, seat in enumerate(self.seats)
            if seat.node.link is not None and seat.node.place == place and seat.state is not NodeState.LOST
        }

    def is_seated(self, node: Node) -> bool:
        """Return True if that launcher has a place in this cycle, and isn't lost."""
        place = self.place_of(node)
        return place is not None and self.seats[place].state is not NodeState.LOST

    def told(self, places: Iterable[int], reports: Mapping[int, Report] | None = None) -> str:
        """Return how the nodes at these places stand, in words; ``reports``: newer ones, that change nothing."""
        latest = {place: self.seats[place].report for place in places} if reports is None else reports
        return job_lines.joined(
            job_lines.bad(place, self.seats[place].name, report.state.value, report.cause.text)
            for place, report in latest.items()
        )

    # -- how it ends ------------------------------------------------------------------------------------------

    def conclude(
        self, now_s: float, *, joining: int, awaits: bool = False, found: Hold | PartVerdict | None = None
    ) -> bool:
        """End the cycle if it is over, or if ``joining`` nodes wait; return True if it has just ended.

        Args:
            awaits: one of its launchers is away, and may know more.
            found: what the parts know.
        """
        self.alarm_s = None
        if self.outcome is not None:
            return False
        if self.shutdown is not None:
            self.outcome = Outcome.STOPPED
        elif isinstance(found, Hold):
            self._wake(found.until_s)
        elif found is not None:
            self.outcome, self.decided_by, self._reached = found.outcome, found.place, found.reached
            self.found = None if found.cause is None else found
        elif self.judged is not None:
            follows = self.seats[self.judged[1]].report.cause.follows and not (awaits or self.rules.min_healthy)
            self.outcome, self.decided_by = (follows and self.explained) or self.judged
        elif joining:
            self.outcome, self.joining = Outcome.MEMBERSHIP, joining
        elif self._farewell_s is not None:
            self._farewells(now_s, self._farewell_s)
        self._ended_s = now_s
        return self.outcome is not None

    def _farewells(self, now_s: float, until_s: float) -> None:
        """End the cycle if all nodes have left that haven't finished, or if the others haven't in time."""
        states = Counter(NodeState.SUCCEEDED if seat.has_finished else seat.state for seat in self.seats)
        if self.rules.judge(states) is Outcome.SUCCEEDED:
            self.outcome = Outcome.SUCCEEDED
        elif now_s < until_s:
            self._wake(until_s)
        else:
            self._farewell_s = None
            for place, seat in enumerate(self.seats):
                text, seat.leaving = seat.leaving, ""
                if place == self._ends_with:
                    self.asked_to_end(place, text)
                    self.outcome = Outcome.STOPPED
                elif text:
                    cause = Cause(kind=CauseKind.REQUEST, text=text)
                    self.changed(place, Report(self.decision.cycle, NodeState.LOST, cause))
            if self.judged is not None and self.outcome is None:
                self.outcome, self.decided_by = self.judged

    @property
    def restarts(self) -> bool:
        """True once it is known that another cycle follows."""
        verdict = self.verdict if self.outcome is not None and self.shutdown is None else None
        return verdict is not None and verdict.decision.action is Action.RESTART

    def end(self, *, nodes_left: int) -> End:
        """Return what tells launchers that it is over, and whether another one is to follow, as far as is known now."""
        assert self.outcome is not None
        expected = verdict_on(self, nodes_left=nodes_left)
        restarts, by_themselves = expected.decision.action is Action.RESTART, expected.cause.rerun is not None
        text = self.finished if self.outcome is Outcome.SUCCEEDED else ""
        return End(self.decision.cycle, self.outcome, restarts, text=text, by_themselves=by_themselves)

    def judge(self, now_s: float, *, nodes_left: int, awaits: bool = False, printer: str = "") -> Verdict | None:
        """Return the verdict, once it is known; None before, and when it was returned already.

        Args:
            awaits: one of its launchers is away, and may yet turn out to be the cause.
            printer: the launcher (instance) that prints it.
        """
        if self.outcome is None or self.verdict is not None:
            return None
        if self.outcome is Outcome.FAILED and self.decided_by is None:
            if awaits:
                return None  # it ended before this leader came
            self.decided_by = first_failure(self.seats, None)
        by = self.decided_by
        if by is not None and self.seats[by].report.cause.follows and (self.found is None or self.found.is_weak):
            place = first_failure(self.seats, by)
            is_known = place not in (None, by) and self.seats[place].state is not NodeState.EXCLUDED
            until_s = self._ended_s + (_CAUSE_S if self.seats[by].report.cause.rerun is None else RERUN_S)
            may_come = self.found is None and now_s < until_s
            if not is_known and (awaits or may_come):
                if may_come:
                    self._wake(until_s)
                return None
            if is_known:
                self.found = None  # the node that the part lacked evidence from has failed
        self.verdict = verdict_on(self, nodes_left=nodes_left, printer=printer)
        return self.verdict

    @property
    def finished(self) -> str:
        """A note on a cycle that has succeeded; empty if it has on all its nodes."""
        others = [place for place, seat in enumerate(self.seats) if not seat.has_finished]
        nodes = len(self.seats)
        if not others:
            return ""
        finished = f"{nodes - len(others)} of {counted(nodes, 'node')}"
        return f"the job finished on {finished}: {self.told(others)}"

    @property
    def advance(self) -> JobProgress:
        """How far the job has got, this cycle included."""
        before = self.decision.advance
        blamed = self.decided_by if self.verdict is None else self.verdict.node
        if self.outcome is not Outcome.FAILED or blamed is None:
            return before
        return before.after(self.how_far, restored=self.has_restored, has_snapshot=self.has_snapshot)

    @property
    def how_far(self) -> Reached | None:
        """How far the cycle got; None if it hasn't failed, or that isn't known."""
        if self.verdict is not None:
            return self.verdict.reached
        if self.outcome is not Outcome.FAILED or self.decided_by is None:
            return None
        place = first_failure(self.seats, self.decided_by) if self.found is None else None
        told = None if place is None else self.seats[place].report.reached
        return self._reached or told or self.seats[self.decided_by].report.reached

    @property
    def own_failures(self) -> list[int]:
        """Places of nodes that have failed, and not only because of another one."""
        return [
            place for place, seat in enumerate(self.seats) if seat.state not in GOOD and not seat.report.cause.follows
        ]

    @property
    def explained(self) -> tuple[Outcome, int] | None:
        """How the cycle ends if others only failed because of these nodes: one that is left out costs no restart.

        None if it goes on, or no node is known to have failed by itself.
        """
        own = self.own_failures if self.judged is not None else []
        if own and all(self.seats[place].state is NodeState.EXCLUDED for place in own):
            return Outcome.MEMBERSHIP, own[0]
        return self.judged if own else None

    def _wake(self, at_s: float) -> None:
        self.alarm_s = earliest(self.alarm_s, at_s)


# -- the verdict ------------------------------------------------------------------------------------------------


def verdict_on(cycle: JobCycle, *, nodes_left: int, printer: str = "") -> Verdict:
    """Return the verdict on a cycle whose outcome is known. ``nodes_left``: that could take part in another one."""
    rules, seats, outcome = cycle.rules, cycle.seats, cycle.outcome
    assert outcome is not None
    has_failed = outcome is Outcome.FAILED
    first = first_failure(seats, cycle.decided_by) if has_failed else None
    # all ranks of the job end by Megatron's rerun state machine with the same code
    report = None if first is None else seats[first].report
    rerun = None if report is None else report.cause.rerun
    decision = rules.decide(
        outcome,
        restarts_before=cycle.decision.restarts,
        nodes_left=nodes_left if any(seat.state is NodeState.EXCLUDED for seat in seats) else None,
        advance=cycle.advance,
        rerun=rerun,
        restored=cycle.has_restored,
    )
    rotation = Rotation.NONE
    if report is not None and rerun in WANTS_ANOTHER_GPU and decision.action is Action.RESTART:
        rotation = Rotation.NODES if len(seats) > 1 else Rotation.NONE
        # a rank that got another GPU of its node may have taken it for the same one: it knows a GPU by the name of the
        # host and the number of the device, which may be 0 in each process. Another host is another GPU for certain
        if report.ranks > 1 and not (rerun is Rerun.AGAIN and len(seats) > 1):
            rotation = Rotation.RANKS
        decision = replace(decision, change=_CHANGES[rotation])
    found = cycle.found.cause if cycle.found is not None and has_failed else None
    cause, node, names_nodes = _cause(cycle, found)
    host = "" if node is None else seats[node].name
    if found is not None and (found.rank is None or found.host):
        host = found.host  # the node that reports a hang is often only waiting
    return Verdict(
        cycle=cycle.decision.cycle,
        outcome=outcome,
        cause=replace(cause, host=host, rerun=rerun),
        decision=decision,
        node=node,
        nodes=len(seats),
        names_nodes=names_nodes,
        code=0 if decision.action is Action.FINISH else NO_PROGRESS_CODE if decision.no_progress else 1,
        stopped=any(seat.leaving for seat in seats),
        rotation=rotation,
        reached=cycle.how_far,
        printer=printer,
    )


def _cause(cycle: JobCycle, found: Cause | None) -> tuple[Cause, int | None, bool]:
    """Return why, the place of the node at fault, and True if the words name the nodes they are about."""
    rules, seats, outcome, decided_by = cycle.rules, cycle.seats, cycle.outcome, cycle.decided_by
    if outcome is Outcome.STOPPED and cycle.shutdown is not None:
        return Cause(kind=CauseKind.REQUEST, text=cycle.shutdown[1]), cycle.shutdown[0], False
    if outcome is Outcome.SUCCEEDED:
        return Cause(kind=CauseKind.REQUEST, text=cycle.finished), None, True
    if found is not None:
        return found, decided_by, True
    if outcome is Outcome.MEMBERSHIP:
        left = [place for place, seat in enumerate(seats) if seat.state is NodeState.EXCLUDED]
        text = cycle.told(left) or f"{counted(cycle.joining, 'node')} waiting to join"
        return Cause(kind=CauseKind.MEMBERSHIP, text=text), left[0] if left else None, True
    good, first = sum(seat.state in GOOD for seat in seats), first_failure(seats, decided_by)
    is_mixed = decided_by is not None and seats[decided_by].report.is_mixed
    if rules.min_healthy and len(seats) > 1 and good < len(seats) and not is_mixed:
        bad = [place for place, seat in enumerate(seats) if seat.state not in GOOD and not seat.leaving]
        text = f"{job_lines.good(good, rules.min_nodes)}: {cycle.told(bad)}"
        return Cause(kind=CauseKind.MEMBERSHIP, text=text), first, True
    if first is None:
        return Cause(kind=CauseKind.MEMBERSHIP, text=job_lines.UNKNOWN_FAILURE), None, True
    return seats[first].report.cause, first, False


def first_failure(seats: Sequence[Seat], decided_by: int | None) -> int | None:
    """Return the node that ended the cycle, or one whose end its own followed from, as far as the reports say."""
    if decided_by is not None and not seats[decided_by].report.cause.follows:
        return decided_by
    bad = [place for place, seat in enumerate(seats) if seat.state not in GOOD]
    causes = [place for place in bad if not seats[place].report.cause.follows]
    if causes:
        return min(causes, key=lambda place: _LIKELY.index(seats[place].state))
    return next(iter(bad), None) if decided_by is None else decided_by
