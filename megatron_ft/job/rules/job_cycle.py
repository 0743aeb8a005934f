"""One cycle as the coordinator sees it: its nodes' states, how it ended, and why. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from megatron_ft.core.facts.launcher import Cause, CauseKind, NodeLost
from megatron_ft.core.times import earliest
from megatron_ft.job.rules import job_lines
from megatron_ft.job.rules.decisions import Decision, DecisionRecord
from megatron_ft.job.rules.liveness import FINISHED_S, excused_s, lost_s, stall_s
from megatron_ft.job.rules.messages import End, Goodbye, NodePhase, NodeStatus, Report, Rules, Verdict
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import Action, JobProgress, NodeState, Outcome, Reached
from megatron_ft.job.rules.verdict import GOOD, Seat, finished, first_failure, verdict_on

NEW_LEADER_S = 12.0
"""Shortest wait of a new leader for the launchers of a cycle that another one has begun."""
_FAREWELL_S = 3.0
"""How long to wait after a node has left whose ranks had all exited with 0: the others may be doing the same."""
_CAUSE_S = 0.3
"""Seconds to wait for the cause after a failure that is only a consequence."""
RERUN_S = 3.0
"""Seconds to wait for the report of the rank whose result Megatron's rerun state machine rejected."""
_GONE = (NodeState.LOST, NodeState.EXCLUDED)


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
        cause: why; None if the part doesn't know.
        is_by_report: the report of that node says why.
        is_weak: that of a node which has failed by itself explains more than ``cause``.
    """

    outcome: Outcome
    place: int
    reached: Reached | None = None
    cause: Cause | None = None
    is_by_report: bool = False
    is_weak: bool = False


@dataclass(slots=True)
class JobCycle:
    """``seats`` by place. Times are seconds of the coordinator's own clock."""

    rules: Rules
    decision: Decision
    seats: list[Seat] = field(init=False)
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    shutdown: tuple[int | None, str] | None = None
    decided_by: int | None = None
    judged: tuple[Outcome, int] | None = None
    """How the reports of its nodes have ended it, and the place of the last of these."""
    has_snapshot: bool = False
    """All its ranks have kept their state, so that they were through their start."""
    lost: int = 0
    """How many nodes were lost or excluded while it ran."""
    gone: set[int] = field(default_factory=set)
    """Places whose nodes have left or were lost, during the cycle or after its end."""
    alarm_s: float | None = None
    """When to call ``conclude`` and ``judge`` again, at the latest."""
    _is_news: bool = False
    _changes: list[int] = field(default_factory=list)
    _losses: list[tuple[int, Report]] = field(default_factory=list)
    _departures: list[NodeLost] = field(default_factory=list)
    _ended_s: float = 0.0
    _farewell_s: float | None = None
    _ends_with: int | None = None
    """Place of the launcher that holds the lock, if it was asked to stop."""
    _counts: Counter[NodeState] = field(default_factory=Counter)
    _reached: Reached | None = None
    found: PartVerdict | None = None
    _longest_gap_s: float | None = None
    """From one progress of a node to its next; None before the first progress."""
    joining: int = 0
    _missing: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        healthy = Report(self.decision.cycle, NodeState.HEALTHY)
        self.seats = [Seat(healthy) for _ in range(self.decision.world)]
        self._counts.update(seat.state for seat in self.seats)

    def await_all(self, record: DecisionRecord, now_s: float) -> None:
        """Wait for the launchers of a cycle that another leader has begun. The record may not name them."""
        for place, seat in enumerate(self.seats):
            if record.instances:
                seat.occupy(record.instances[place], record.names[place])
            self.missing(place, now_s)

    # -- reports of its nodes ---------------------------------------------------------------------------------

    def occupied(self, place: int, instance: str, name: str) -> bool:
        """A launcher has that place; False if it can't have it any more."""
        seat = self.seats[place]
        if seat.state is NodeState.LOST or seat.instance not in ("", instance):
            return False
        seat.occupy(instance, name)
        self._missing.discard(place)
        return True

    def restored(self, place: int, standing: NodeStatus, now_s: float) -> None:
        """Take over what a launcher reports of this cycle to a coordinator that may not know it."""
        if standing.cycle != self.decision.cycle:
            return
        if standing.report is not None:
            self.changed(place, standing.report)
        if standing.ended is not None and self.outcome is None:
            self.outcome, self._ended_s, self._is_news = standing.ended, now_s, True
        if self.verdict is None and standing.verdict is not None:
            self.verdict, self._is_news = standing.verdict, True

    def changed(self, place: int, report: Report) -> None:
        """A node reports another state."""
        seat = self.seats[place]
        if report.cycle != self.decision.cycle:
            return
        if report.state in _GONE:
            self._note_departure(place, report)
        has_ended_it = self.judged == (Outcome.FAILED, place) and not seat.report.cause.follows
        if report.state is NodeState.EXCLUDED and has_ended_it:
            report = replace(seat.report, state=NodeState.EXCLUDED)  # the failure came first, and costs a restart
        if self.outcome is not None:
            is_listed = self.verdict is None and self.rules.min_healthy  # by the verdict
            if report.state in _GONE and seat.state not in _GONE and not is_listed:
                self._losses.append((place, report))
            if self.verdict is None and not report.cause.follows and report.state is not NodeState.SUCCEEDED:
                seat.change(report)  # its report took longer than those of the nodes that failed because of it
            return
        before = seat.state
        if seat.change(report):
            self._counts[before] -= 1
            self._counts[report.state] += 1
            self._changes.append(place)
            self.lost += report.state in _GONE
            judged = None if self.judged is not None else self.rules.policy.judge(self._counts)
            if self.judged is None and report.is_mixed:
                judged = Outcome.FAILED
            if judged is not None:
                self.judged = judged, place

    def _note_departure(self, place: int, report: Report) -> None:
        if place not in self.gone and (report.state is NodeState.EXCLUDED or report.cause.kind is CauseKind.MEMBERSHIP):
            name, cause = self.seats[place].name, report.cause.text
            self._departures.append(NodeLost(cycle=self.decision.cycle, node=name, text=cause))
        self.gone.add(place)

    @property
    def has_departures(self) -> bool:
        return bool(self._departures)

    def take_departures(self) -> list[NodeLost]:
        """Nodes that have left without being asked to since the last call, whether the cycle ran or not."""
        taken, self._departures = self._departures, []
        return taken

    def missing(self, place: int, now_s: float) -> None:
        """The launcher at that place isn't connected (yet, or any more)."""
        if self.seats[place].state not in _GONE:
            self.seats[place].miss(now_s)
            self._missing.add(place)

    def lose(self, place: int, text: str) -> None:
        """Count the node at that place as lost."""
        self._missing.discard(place)
        self.changed(place, Report(self.decision.cycle, NodeState.LOST, Cause(text=text)))

    def finish_without(self, place: int, text: str, now_s: float) -> None:
        """End the cycle as one that has finished: all other nodes have, and this one has been silent for long."""
        self._missing.discard(place)
        if self.outcome is None:
            self.seats[place].change(Report(self.decision.cycle, NodeState.LOST, Cause(text=text)))
            self.outcome, self._ended_s, self._is_news = Outcome.SUCCEEDED, now_s, True

    def progressed(self, node: Node, at_s: float) -> None:
        """Note the time of the last progress of a node's ranks, as a beat of its launcher tells it."""
        if self.place_of(node) is not None:
            self._longest_gap_s = max(self._longest_gap_s or 0.0, node.progressed(at_s))

    def excused_s(self, connected: Iterable[Node], now_s: float) -> float:
        """Return the seconds for which one of the nodes may be silent before it counts as lost."""
        world = len(self.seats)
        if self.outcome is not None:
            return lost_s(world)
        heard = [
            (node, self.seats[place].state)
            for node in connected
            if (place := self.place_of(node)) is not None and now_s - node.heard_s < lost_s(world)
        ]
        if heard and all(state is NodeState.SUCCEEDED for _, state in heard):
            return FINISHED_S
        if self._longest_gap_s is None or self.rules.min_healthy or not heard:
            return max(lost_s(world), self.rules.node_lost_s)
        limit_s = stall_s(world, self._longest_gap_s)
        going = {
            node.progress_s is not None and now_s - node.progress_s < limit_s
            for node, state in heard
            if state is not NodeState.SUCCEEDED
        }
        return excused_s(world, going)

    def lose_missing(self, connected: Iterable[Node], now_s: float, *, may_lose: bool) -> None:
        """Count nodes as lost that haven't come to a new leader, by the rule for silent ones, but not before 12 s.

        To be called before ``conclude``.
        """
        self.alarm_s = None
        if not self._missing or not may_lose:
            return
        excused_s = self.excused_s(connected, now_s)
        after_s = max(NEW_LEADER_S, lost_s(len(self.seats)), excused_s)
        for place in sorted(self._missing):
            since_s = self.seats[place].missing_s or 0.0
            if now_s < since_s + after_s:
                self._wake(since_s + after_s)
            elif excused_s == FINISHED_S:
                self.finish_without(place, job_lines.silent(after_s), now_s)
            else:
                self.lose(place, job_lines.silent(after_s))

    def farewell(self, place: int, goodbye: Goodbye, now_s: float, *, ends_job: bool = False) -> None:
        """The node at that place leaves the job. ``ends_job``: its launcher holds the lock: the job ends, too."""
        if ends_job and not (goodbye.well and self.outcome is None):
            self.asked_to_end(place, goodbye.text)
            return
        state = NodeState.EXCLUDED if goodbye.excluded else NodeState.LOST
        if goodbye.well and not goodbye.excluded and self.outcome is None:
            # the others may have been asked to end, too: then the job has ended as it was asked to
            self.gone.add(place)
            self.seats[place].leave(goodbye.text)
            self._farewell_s, self._ends_with = now_s + _FAREWELL_S, place if ends_job else self._ends_with
            return
        kind = CauseKind.MEMBERSHIP if goodbye.failed else CauseKind.REQUEST
        self.changed(place, Report(self.decision.cycle, state, Cause(kind=kind, text=goodbye.text)))

    def asked_to_end(self, place: int | None, text: str) -> None:
        """A rank of that node has requested the end of the job, with these words; the first request counts."""
        self.shutdown = self.shutdown or (place, text)

    # -- questions about its nodes ----------------------------------------------------------------------------

    def count(self, *states: NodeState) -> int:
        """How many nodes are in one of these states."""
        return sum(self._counts[state] for state in states)

    def place_of(self, node: Node) -> int | None:
        """The place of that launcher in this cycle, lost or not. ``node.place`` may be one of another cycle."""
        place = node.place
        has_it = place is not None and place < len(self.seats) and self.seats[place].instance == node.instance
        return place if has_it else None

    @property
    def healthy(self) -> list[int]:
        """Places of the nodes whose ranks run, as far as is known."""
        return [place for place, seat in enumerate(self.seats) if seat.state is NodeState.HEALTHY]

    def links(self, nodes: Iterable[Node]) -> dict[int, int]:
        """Connections of the launchers that take part in this cycle, by place."""
        return {
            node.place: node.link
            for node in nodes
            if node.place is not None and node.link is not None and self.is_seated(node)
        }

    def is_seated(self, node: Node) -> bool:
        """Whether that launcher has a place in this cycle, and isn't lost."""
        place = self.place_of(node)
        return place is not None and self.seats[place].state is not NodeState.LOST

    def why_lost(self, node: Node) -> str:
        """Why that launcher has no place in this cycle any more, or none in it at all."""
        place = self.place_of(node)
        return job_lines.without(self.decision.cycle) if place is None else self.seats[place].report.cause.text

    def is_missing(self, place: int) -> bool:
        """Whether that place may yet be claimed by the launcher that had it."""
        return place in self._missing

    def take_news(self) -> bool:
        """Whether a launcher has reported how the cycle ended, which the others may not know, since the last call."""
        taken, self._is_news = self._is_news, False
        return taken

    def take_changes(self) -> list[int]:
        """Places whose nodes have changed their state while the cycle ran, since the last call."""
        taken, self._changes = self._changes, []
        return taken

    def take_losses(self) -> list[tuple[int, Report]]:
        """Places of nodes lost after the end of the cycle, since the last call; without the one in its verdict."""
        verdict = self.verdict
        assert verdict is not None
        taken, self._losses = self._losses, []
        return [(place, report) for place, report in taken if place != verdict.node]

    def too_few(self, left: int) -> str:
        """Why the job can't continue with that many nodes; empty if it can."""
        return job_lines.too_few_left(left=left, min_nodes=self.rules.min_nodes) if left < self.rules.min_nodes else ""

    # -- how it ends ------------------------------------------------------------------------------------------

    def conclude(self, now_s: float, *, joining: int, found: Hold | PartVerdict | None = None) -> bool:
        """End the cycle if it is over, or if ``joining`` nodes wait; return True if it has just ended.

        ``found``: what the parts know.
        """
        if self.outcome is not None:
            return False
        if self.shutdown is not None:
            self.outcome = Outcome.STOPPED
        elif isinstance(found, Hold):
            self._wake(found.until_s)
        elif found is not None:
            self.outcome, self.decided_by, self._reached = found.outcome, found.place, found.reached
            self.found = None if found.is_by_report else found
        elif self.judged is not None:
            follows = self.seats[self.judged[1]].report.cause.follows and not (self._missing or self.rules.min_healthy)
            self.outcome, self.decided_by = self.explained if follows and self.has_own_failure else self.judged
        elif joining:
            self.outcome, self.joining = Outcome.MEMBERSHIP, joining
        elif self._farewell_s is not None:
            self._farewells(now_s)
        self._ended_s = now_s
        return self.outcome is not None

    @property
    def restarts(self) -> bool:
        """True once it is known that another cycle follows."""
        verdict = self.verdict if self.outcome is not None and self.shutdown is None else None
        return verdict is not None and verdict.decision.action is Action.RESTART

    def give_up_round(self, place: int | None, text: str) -> None:
        """A node has left after the cycle's end, and the others, which meet for the next one, are too few."""
        if self.verdict is not None and self.verdict.decision.action is Action.RESTART:
            self.asked_to_end(place, text)

    def end(self, *, nodes_left: int) -> End:
        """For the launchers: it is over, and whether another one is to follow, as far as is known now."""
        assert self.outcome is not None
        expected = verdict_on(self, nodes_left=nodes_left)
        restarts, by_themselves = expected.decision.action is Action.RESTART, expected.cause.rerun is not None
        text = finished(self.seats) if self.outcome is Outcome.SUCCEEDED else ""
        return End(self.decision.cycle, self.outcome, restarts, text=text, by_themselves=by_themselves)

    def judge(self, now_s: float, *, nodes_left: int, has_absent: bool = False, printer: str = "") -> Verdict | None:
        """Return the verdict, once it is known; None before, and when it was returned already.

        ``has_absent``: the connection of one of its nodes has just ended, and may yet turn out to be the cause;
        ``printer``: the launcher (instance) that prints it.
        """
        if self.outcome is None or self.verdict is not None:
            return None
        if self.outcome is Outcome.FAILED and self.decided_by is None:
            if self._missing:
                return None  # it ended before this coordinator came, and a missing node may know why
            self.decided_by = first_failure(self.seats, None)
        by = self.decided_by
        if by is not None and self.seats[by].report.cause.follows and (self.found is None or self.found.is_weak):
            place = first_failure(self.seats, by)
            is_known = place not in (None, by) and self.seats[place].state is not NodeState.EXCLUDED
            within_s = _CAUSE_S if self.seats[by].report.cause.rerun is None else RERUN_S
            may_come = self.found is None and now_s < self._ended_s + within_s
            if not is_known and (self._missing or has_absent or may_come):
                if may_come:
                    self._wake(self._ended_s + within_s)
                return None  # a missing node may be the cause
            if is_known:
                self.found = None  # the node that the part lacked evidence from has failed
        self.verdict = verdict_on(self, nodes_left=nodes_left, printer=printer)
        return self.verdict

    @property
    def shutdown_text(self) -> str:
        """Reason of a request for the end of the job, with the requesting node if there are several."""
        place, text = self.shutdown or (None, "")
        if place is None or len(self.seats) == 1:
            return text
        return job_lines.on(place, self.seats[place].name, text)

    @property
    def awaited(self) -> int:
        """How many places may yet be claimed by the launchers that had them."""
        return len(self._missing)

    @property
    def advance(self) -> JobProgress:
        """How far the job has got, this cycle included."""
        before = self.decision.advance
        blamed = self.decided_by if self.verdict is None else self.verdict.node
        if self.outcome is not Outcome.FAILED or blamed is None:
            return before
        restored = self.decision.restore is not None
        return before.after(self.how_far, restored=restored, has_snapshot=self.has_snapshot)

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
    def restarts_used(self) -> int:
        """Restarts of the job so far, with the one that follows a failure of this cycle."""
        return self.decision.restarts + (self.outcome is Outcome.FAILED)

    @property
    def has_own_failure(self) -> bool:
        """Whether a node has failed, and not only because of another one."""
        return self.judged is not None and bool(self.own_failures)

    @property
    def own_failures(self) -> list[int]:
        return [
            place for place, seat in enumerate(self.seats) if seat.state not in GOOD and not seat.report.cause.follows
        ]

    @property
    def explained(self) -> tuple[Outcome, int]:
        """How the cycle ends if others only failed because of these nodes: one that is left out costs no restart."""
        own, judged = self.own_failures, self.judged
        assert judged is not None
        if all(self.seats[place].state is NodeState.EXCLUDED for place in own):
            return Outcome.MEMBERSHIP, own[0]
        return judged

    def _farewells(self, now_s: float) -> None:
        states = Counter(NodeState.SUCCEEDED if seat.has_finished else seat.state for seat in self.seats)
        if self.rules.policy.judge(states) is Outcome.SUCCEEDED:
            self.outcome = Outcome.SUCCEEDED
        elif now_s < (self._farewell_s or 0.0):
            self._wake(self._farewell_s or 0.0)
        else:
            self._farewell_s = None
            for place, seat in enumerate(self.seats):
                text = seat.take_leaving()
                if place == self._ends_with:
                    self.asked_to_end(place, text)
                    self.outcome = Outcome.STOPPED
                elif text:
                    self.changed(
                        place, Report(self.decision.cycle, NodeState.LOST, Cause(kind=CauseKind.REQUEST, text=text))
                    )
            if self.judged is not None and self.outcome is None:
                self.outcome, self.decided_by = self.judged

    def _wake(self, at_s: float) -> None:
        self.alarm_s = earliest(self.alarm_s, at_s)


def printer(cycle: JobCycle | None, nodes: Iterable[Node]) -> Node | None:
    """Return the launcher that prints the lines of the job; None if none is connected."""
    here = (node for node in nodes if node.link is not None and node.phase is not NodePhase.EXCLUDED)
    return min(here, key=lambda each: (cycle is None or not cycle.is_seated(each), _order(each)), default=None)


def _order(node: Node) -> tuple[float, float, int]:
    """Sort key of nodes that meet: by their places so far."""
    place, rank = node.place, node.rank
    return math.inf if place is None else place, math.inf if rank is None else rank, node.arrived
