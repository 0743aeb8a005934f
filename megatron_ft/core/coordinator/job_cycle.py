"""One cycle as the coordinator sees it: its nodes' states, how it ended, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from megatron_ft.core.coordinator.job_phases import CoordinatorMove, CoordinatorPhase, JobState
from megatron_ft.core.coordinator.nodes import Node
from megatron_ft.core.coordinator.verdict import GOOD, Seat, failure_signature, finished, first_failure, verdict_on
from megatron_ft.core.facts.launcher import Cause, CauseKind, NodeLost
from megatron_ft.core.job import job_lines
from megatron_ft.core.job.actions import Send
from megatron_ft.core.job.decisions import Decision, DecisionRecord
from megatron_ft.core.job.liveness import FINISHED_S, excused_s, lost_s, stall_s
from megatron_ft.core.job.messages import (
    DiagnoseHang,
    End,
    Goodbye,
    Hang,
    NodeStatus,
    RankSnapshots,
    Report,
    Rules,
    Verdict,
)
from megatron_ft.core.job.restart_policy import Action, JobProgress, NodeState, Outcome, Reached
from megatron_ft.core.times import earliest
from megatron_ft.diagnosis.cycle_cause import describe_hang, undetermined_hang
from megatron_ft.diagnosis.hang_diagnosis import HangDiagnosis
from megatron_ft.memory.leader.complete_snapshots import CompleteSnapshots
from megatron_ft.memory.leader.snapshot_copies import SnapshotCopies
from megatron_ft.memory.rules.choice import CycleEnd

_FAREWELL_S = 3.0
"""How long to wait after a node has left whose ranks had all exited with 0: the others may be doing the same."""
_CAUSE_S = 0.3
"""Seconds to wait for the cause after a failure that is only a consequence."""
RERUN_S = 3.0
"""Seconds to wait for the report of the rank whose result Megatron's rerun state machine rejected."""
_GONE = (NodeState.LOST, NodeState.EXCLUDED)


@dataclass(slots=True)
class JobCycle:
    """``seats`` by place. Times are seconds of the coordinator's own clock."""

    rules: Rules
    decision: Decision
    state: JobState = field(default_factory=lambda: JobState(CoordinatorPhase.RUNNING))
    """Phase of the job; RUNNING by the time the cycle is made."""
    seats: list[Seat] = field(init=False)
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    shutdown: tuple[int | None, str] | None = None
    decided_by: int | None = None
    diagnosis: HangDiagnosis | None = None
    review: HangDiagnosis | None = None
    """The observe-only diagnosis: its ranks go on, whatever it finds."""
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
    _judged: tuple[Outcome, int] | None = None
    _counts: Counter[NodeState] = field(default_factory=Counter)
    _reached: Reached | None = None
    _hang_reached: Reached | None = None
    _longest_gap_s: float | None = None
    """From one progress of a node to its next; None before the first progress."""
    _joining: int = 0
    _missing: set[int] = field(default_factory=set)
    snapshots: CompleteSnapshots = field(init=False)
    copies: SnapshotCopies = field(init=False)

    def __post_init__(self) -> None:
        healthy = Report(self.decision.cycle, NodeState.HEALTHY)
        world = self.decision.world
        self.seats = [Seat(healthy) for _ in range(world)]
        self._counts.update(seat.state for seat in self.seats)
        self.snapshots = CompleteSnapshots(self.decision.cycle, world)
        self.copies = SnapshotCopies(self.decision.cycle, world, self.rules.segment)

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
            self.outcome, self._is_news = standing.ended, True
            self._over(now_s)
        if self.verdict is None and standing.verdict is not None:
            self._is_news = True
            self._take_verdict(standing.verdict)

    def changed(self, place: int, report: Report) -> None:
        """A node reports another state."""
        seat = self.seats[place]
        if report.cycle != self.decision.cycle:
            return
        if report.state in _GONE:
            self._note_departure(place, report)
        has_ended_it = self._judged == (Outcome.FAILED, place) and not seat.report.cause.follows
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
            judged = None if self._judged is not None else self.rules.policy.judge(self._counts)
            if self._judged is None and report.is_mixed:
                judged = Outcome.FAILED
            if judged is not None:
                self._judged = judged, place

    def _note_departure(self, place: int, report: Report) -> None:
        if place not in self.gone and (report.state is NodeState.EXCLUDED or report.cause.kind is CauseKind.MEMBERSHIP):
            name, cause = self.seats[place].name, report.cause.text
            self._departures.append(NodeLost(cycle=self.decision.cycle, node=name, text=cause))
        self.gone.add(place)

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
        for diagnosis in filter(None, (self.diagnosis, self.review)):
            diagnosis.lost(place)
        self.changed(place, Report(self.decision.cycle, NodeState.LOST, Cause(text=text)))

    def finish_without(self, place: int, text: str, now_s: float) -> None:
        """End the cycle as one that has finished: all other nodes have, and this one has been silent for long."""
        if self.outcome is None:
            self.seats[place].change(Report(self.decision.cycle, NodeState.LOST, Cause(text=text)))
            self.outcome, self._is_news = Outcome.SUCCEEDED, True
            self._over(now_s)

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

    def lose_missing(self, after_s: float, now_s: float) -> None:
        """Count nodes as lost that have been missing for ``after_s`` seconds; to be called before ``conclude``."""
        self.alarm_s = None
        for place in sorted(self._missing):
            since_s = self.seats[place].missing_s or 0.0
            if now_s >= since_s + after_s:
                self.lose(place, job_lines.silent(after_s))
            else:
                self._wake(since_s + after_s)

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

    def hang(self, place: int, hang: Hang, nodes: Iterable[Node], now_s: float) -> list[int]:
        """A rank of that node hangs. Returns the connections of those that are to collect evidence on their ranks now.

        Of thousands of nodes that detect the same hang all but the first cost nothing.
        """
        # a question that decides takes the place of one that only reports
        is_asked = self.review is not None and (self.review.decides or not hang.decides)
        is_refused = is_asked if hang.passive else self.rules.min_healthy
        if is_refused or self.diagnosis is not None or self.outcome is not None:
            return []
        links = self.links(nodes)
        # also of a launcher whose connection has just ended: its end may be what the others' ranks have felt
        asked = links.keys() | {place for place in range(len(self.seats)) if place not in self.gone}
        is_whole = len(asked) == len(self.seats)
        diagnosis = HangDiagnosis(hang.verdict, place, asked=asked, are_all=is_whole, decides=hang.decides, now_s=now_s)
        if hang.passive:
            self.review = diagnosis
        else:
            self.diagnosis, self._hang_reached = diagnosis, hang.reached
        return [*links.values()]

    def questions_to(self, place: int) -> list[DiagnoseHang]:
        """Requests for evidence of a hang to the node at that place, which has just connected."""
        open_ones = ((self.diagnosis, False), (self.review, True)) if self.outcome is None else ()
        return [
            DiagnoseHang(self.decision.cycle, passive, looks=diagnosis.decides)
            for diagnosis, passive in open_ones
            if diagnosis is not None and diagnosis.awaits(place)
        ]

    def noted(self, place: int, notes: RankSnapshots) -> None:
        """Take the evidence that the node at that place has collected."""
        diagnosis = self.review if notes.passive else self.diagnosis
        if diagnosis is not None:
            name = self.seats[place].name  # of ranks that have exited only their launcher tells, which knows no name
            named = [each if each.host else replace(each, host=name) for each in notes.notes]
            diagnosis.told(place, named, more=notes.more)

    def asked_to_end(self, place: int | None, text: str) -> None:
        """A rank of that node has requested the end of the job, with these words; the first request counts."""
        self.shutdown = self.shutdown or (place, text)
        self.state.move(CoordinatorMove.REQUEST)

    def reviewed(self, now_s: float, nodes: Iterable[Node]) -> list[Send]:
        """The result of an observe-only hang diagnosis, for all nodes: once it is known, if no rank has moved since."""
        review = self.review
        if review is None or (review.is_open(now_s) and self.outcome is None):
            return []
        self.review = None
        found = review.reviewed(self.decision.cycle, several=len(self.seats) > 1)
        if found is None or self.outcome is not None:
            return []
        return [Send(list(self.links(nodes).values()), found)]

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

    def conclude(self, now_s: float, *, joining: int) -> bool:
        """End the cycle if it is over, or if ``joining`` nodes wait; returns whether it has just ended."""
        if self.outcome is not None:
            return False
        if self.review is not None:
            self._wake(self.review.bound_s)
        if self.shutdown is not None:
            self.outcome = Outcome.STOPPED
        elif self.diagnosis is not None and self.diagnosis.is_of_lost_peer and self._has_own_failure:
            self.diagnosis = None  # what that node did explains the peers that were lost
            self.outcome, self.decided_by = self._explained
        elif self.diagnosis is not None and self.diagnosis.is_open(now_s):
            self._wake(self.diagnosis.bound_s)
        elif self.diagnosis is not None:
            self._conclude_hang(self.diagnosis)
        elif self._judged is not None:
            follows = self.seats[self._judged[1]].report.cause.follows and not (self._missing or self.rules.min_healthy)
            self.outcome, self.decided_by = self._explained if follows and self._has_own_failure else self._judged
        elif joining:
            self.outcome, self._joining = Outcome.MEMBERSHIP, joining
        elif self._farewell_s is not None:
            self._farewells(now_s)
        if self.outcome is not None:
            self._over(now_s)
        return self.outcome is not None

    def _over(self, now_s: float) -> None:
        """Note that the outcome is known."""
        self._ended_s = now_s
        self.state.move(CoordinatorMove.ENDED)
        if self.verdict is not None:  # a lost node may have told it before another one has told the outcome
            self._take_verdict(self.verdict)

    def _take_verdict(self, verdict: Verdict) -> None:
        self.verdict = verdict
        restarts = verdict.decision.action is Action.RESTART and self.shutdown is None
        self.state.move(CoordinatorMove.RESTART if restarts else CoordinatorMove.NO_RESTART)

    def give_up_round(self, place: int | None, text: str) -> None:
        """A node has left after the cycle's end, and the others, which meet for the next one, are too few."""
        if self.verdict is not None and self.verdict.decision.action is Action.RESTART:
            self.asked_to_end(place, text)

    def end(self, *, nodes_left: int) -> End:
        """For the launchers: it is over, and whether another one is to follow, as far as is known now."""
        assert self.outcome is not None
        expected = self._judge(nodes_left)
        restarts, by_themselves = expected.decision.action is Action.RESTART, expected.cause.rerun is not None
        text = finished(self.seats) if self.outcome is Outcome.SUCCEEDED else ""
        return End(self.decision.cycle, self.outcome, restarts, text=text, by_themselves=by_themselves)

    def judge(self, now_s: float, *, nodes_left: int, has_absent: bool = False) -> Verdict | None:
        """Return the verdict, once it is known; None before, and when it was returned already.

        ``has_absent``: the connection of one of its nodes has just ended, and may yet turn out to be the cause.
        """
        if self.outcome is None or self.verdict is not None:
            return None
        if self.outcome is Outcome.FAILED and self.decided_by is None:
            if self._missing:
                return None  # it ended before this coordinator came, and a missing node may know why
            self.decided_by = first_failure(self.seats, None)
        by = self.decided_by
        if by is not None and self.seats[by].report.cause.follows and self._lacks_evidence:
            place = first_failure(self.seats, by)
            is_known = place not in (None, by) and self.seats[place].state is not NodeState.EXCLUDED
            within_s = _CAUSE_S if self.seats[by].report.cause.rerun is None else RERUN_S
            may_come = self.diagnosis is None and now_s < self._ended_s + within_s
            if not is_known and (self._missing or has_absent or may_come):
                self._wake(self._ended_s + within_s)
                return None  # a missing node may be the cause
            if is_known:
                self.diagnosis = None  # the node that it lacked evidence from has failed
        verdict = self._judge(nodes_left)
        self._take_verdict(verdict)
        return verdict

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
        return before.after(self._how_far, restored=restored, has_snapshot=self.snapshots.has_complete)

    @property
    def _how_far(self) -> Reached | None:
        """How far the cycle got; None if it hasn't failed, or that isn't known."""
        if self.verdict is not None:
            return self.verdict.reached
        if self.outcome is not Outcome.FAILED or self.decided_by is None:
            return None
        place = first_failure(self.seats, self.decided_by) if self.diagnosis is None else None
        told = None if place is None else self.seats[place].report.reached
        return self._reached or told or self.seats[self.decided_by].report.reached

    @property
    def end_for_snapshots(self) -> CycleEnd:
        """How the cycle ended, for the choice of what the next one goes on from."""
        verdict, reached = self.verdict, self._how_far
        assert verdict is not None
        return CycleEnd(
            self.decision.cycle,
            self.decision.restore,
            failure_signature(verdict, self.seats),
            None if reached is None else reached.last,
            self.decision.advance.is_exceeded(reached),
            verdict.cause.rerun is not None,
            self.decision.restore is not None or self.snapshots.has_complete,
            self.snapshots.is_read,
        )

    @property
    def restarts_used(self) -> int:
        """Restarts of the job so far, with the one that follows a failure of this cycle."""
        return self.decision.restarts + (self.outcome is Outcome.FAILED)

    def _judge(self, nodes_left: int) -> Verdict:
        assert self.outcome is not None
        found, diagnosis = None, self.diagnosis
        if diagnosis is not None and (found := diagnosis.cause(several=len(self.seats) > 1)) is not None:
            unheard = [job_lines.node(place, self.seats[place].name) for place in diagnosis.unheard]
            if found.rank is None and unheard:
                found = replace(found, detail=job_lines.joined([found.detail, job_lines.no_evidence(unheard)]))
        return verdict_on(
            self.rules,
            self.seats,
            self.outcome,
            cycle=self.decision.cycle,
            restarts=self.decision.restarts,
            advance=self.advance,
            decided_by=self.decided_by,
            found=found if self.outcome is Outcome.FAILED else None,
            shutdown=self.shutdown,
            nodes_left=nodes_left,
            joining=job_lines.nodes_waiting(self._joining),
            restored=self.decision.restore is not None,
            reached=self._how_far,
        )

    def _conclude_hang(self, diagnosis: HangDiagnosis) -> None:
        """End the cycle: for a lost node if there is one and the notes name no rank, since the others wait for its."""
        self.outcome, self.decided_by, self._reached = Outcome.FAILED, diagnosis.asker, self._hang_reached
        found, lost = diagnosis.cause(several=len(self.seats) > 1), None if self._judged is None else self._judged[1]
        if diagnosis.is_of_lost_peer:
            if found is None:  # the report on the ranks that lost their peer is still on its way if nothing is judged
                self.diagnosis, self._reached = None, None
                self.outcome, self.decided_by = self._judged or (None, None)
            return
        if lost is not None and self.seats[lost].state is NodeState.LOST and (found is None or found.rank is None):
            self.decided_by, self.diagnosis = lost, None
            return
        if found is not None and found.kind is CauseKind.HANG:
            exited = [place for place in self._own_failures if self._has_exited(place, found.rank)]
            if exited:  # its node has said how it ended
                self.decided_by, self.diagnosis = exited[0], None
                return
        cycle, first = self.decision.cycle, diagnosis.first
        cause = Cause(kind=CauseKind.HANG, text=describe_hang(first), rank=first.rank, section=first.timed)
        if found is None and not first.stopped:  # without evidence it may only have waited for another rank
            cause = undetermined_hang(first, detail="root cause undetermined")
        hung = Report(cycle, NodeState.UNHEALTHY, cause)
        self.seats[diagnosis.asker].change(hung)

    @property
    def _lacks_evidence(self) -> bool:
        """Whether no rank is known to be the cause of a failure that follows from another one."""
        if self.diagnosis is None:
            return True
        found = self.diagnosis.cause(several=len(self.seats) > 1)
        return self.diagnosis.is_of_lost_peer and bool(self.diagnosis.unheard) and (found is None or found.rank is None)

    def _has_exited(self, place: int, rank: int | None) -> bool:
        """Whether the node at that place has failed by the end of that rank, and not by a hang of it."""
        cause = self.seats[place].report.cause
        return rank is not None and cause.rank == rank and cause.kind is not CauseKind.HANG

    @property
    def _has_own_failure(self) -> bool:
        """Whether a node has failed, and not only because of another one."""
        return self._judged is not None and bool(self._own_failures)

    @property
    def _own_failures(self) -> list[int]:
        return [
            place for place, seat in enumerate(self.seats) if seat.state not in GOOD and not seat.report.cause.follows
        ]

    @property
    def _explained(self) -> tuple[Outcome, int]:
        """How the cycle ends if others only failed because of these nodes: one that is left out costs no restart."""
        own, judged = self._own_failures, self._judged
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
            if self._judged is not None and self.outcome is None:
                self.outcome, self.decided_by = self._judged

    def _wake(self, at_s: float) -> None:
        self.alarm_s = earliest(self.alarm_s, at_s)
