"""One cycle as the leader sees it: the states of its nodes, how it ended, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
from megatron_ft.link.base.wording import counted, listed
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


@dataclass(slots=True)
class Seat:
    """A place in a cycle, its node, and how that stands."""

    report: Report
    node: Node

    @property
    def state(self) -> NodeState:
        return self.report.state


class JobCycle:
    """``nodes`` by place. Times are seconds of the leader's own clock."""

    def __init__(self, rules: Rules, decision: Decision, nodes: Iterable[Node]) -> None:
        self.rules, self.decision = rules, decision
        healthy = Report(decision.cycle, NodeState.HEALTHY)
        self.seats = [Seat(healthy, node) for node in nodes]
        self.outcome: Outcome | None = None
        self.verdict: Verdict | None = None
        self.is_told = False
        """All launchers that are here were sent the verdict."""
        self.shutdown: tuple[int | None, str] | None = None
        """The first request for the end of the job: from which node, and its words."""
        self.judged: tuple[Outcome, int] | None = None
        """How a report of one of its nodes has ended it, and the place of that; None if another leader knew it."""
        self.found: Cause | None = None
        """The cause that a part has found, in words which name the nodes that they are about."""
        self.joining = 0
        """Nodes that wait to join."""
        self.has_restored = False
        """Its ranks go on from a snapshot in memory."""
        self.has_snapshot = False
        """All its ranks have kept their state, so that they were through their start."""
        self.gone: set[int] = set()
        """Places whose nodes have left or were lost, during the cycle or after its end."""
        self.alarm_s: float | None = None
        """When to call ``conclude`` and ``judge`` again, at the latest."""
        self.news: list[tuple[int, Report]] = []
        """Reports of nodes that users don't know yet, with their places: of the running cycle, or since its end."""
        self.departures: list[NodeLost] = []
        """Nodes that have left without being asked to, which users don't know yet."""
        self._counts = Counter(seat.state for seat in self.seats)
        self._ended_s = 0.0
        self.leaving: dict[int, tuple[Goodbye, bool]] = {}
        """Farewells of nodes whose ranks had all ended with 0, by place, and whether the job ends with the launcher."""
        self._farewell_s = 0.0
        """When these nodes count as lost, unless all others have left or finished by then."""
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
            self.outcome, self.judged, self._ended_s = standing.ended, None, now_s
        self.verdict = self.verdict or standing.verdict

    def changed(self, place: int, report: Report) -> None:
        """A node reports its state. Of a cycle that is over, only what may explain its end counts."""
        seat, before = self.seats[place], self.seats[place].report
        if report.cycle != self.decision.cycle:
            return
        was_gone = place in self.gone
        if report.state in GONE and not was_gone:
            self.gone.add(place)
            if report.state is NodeState.EXCLUDED or report.cause.kind is CauseKind.MEMBERSHIP:
                self.departures.append(NodeLost(cycle=report.cycle, node=seat.node.name, text=report.cause.text))
        if report.state is NodeState.EXCLUDED and self.judged == (Outcome.FAILED, place) and not before.cause.follows:
            report = replace(before, state=NodeState.EXCLUDED)  # the failure came first, and costs a restart
        is_telling = (before.cause.follows and not report.cause.follows) or report.is_mixed > before.is_mixed
        is_late = self.outcome is not None and (report.cause.follows or report.state is NodeState.SUCCEEDED)
        is_late = is_late or (self.verdict is not None and was_gone)
        if before.state in _FINAL or is_late or (report.state is before.state and not is_telling):
            return
        self.news.append((place, report))
        if self.verdict is not None:
            return  # parts ask how its nodes stood
        seat.report = report
        self._counts[before.state] -= 1
        self._counts[report.state] += 1
        judged = Outcome.FAILED if report.is_mixed else self.rules.judge(self._counts)
        if self.judged is None and self.outcome is None and judged is not None:
            self.judged = judged, place

    def failed(self, place: int, reached: Reached | None, found: Cause | None = None) -> None:
        """A part ends the cycle, under every policy, for what the node at that place has reported, or for ``found``."""
        seat, self.judged, self.found = self.seats[place], (Outcome.FAILED, place), found
        if found is not None:
            state = seat.state if seat.state in GONE else NodeState.UNHEALTHY
            seat.report = replace(seat.report, state=state, cause=found)
        seat.report = replace(seat.report, reached=reached or seat.report.reached)

    def lose(self, place: int, text: str) -> None:
        """Count the node at that place as lost."""
        self.changed(place, Report(self.decision.cycle, NodeState.LOST, Cause(text=text)))

    def finish_without(self, place: int, text: str, now_s: float) -> None:
        """End the cycle as one that has finished: all other nodes have, and this one has been silent for long."""
        if self.seats[place].state is not NodeState.SUCCEEDED:
            self.seats[place].report = Report(self.decision.cycle, NodeState.LOST, Cause(text=text))
        self.outcome, self._ended_s = Outcome.SUCCEEDED, now_s

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
        if goodbye.code == 0 and not goodbye.excluded and self.outcome is None:
            # the others may have been asked to end, too: then the job has ended as it was asked to
            if not ends_job:
                self.gone.add(place)
            self.leaving[place], self._farewell_s = (goodbye, ends_job), now_s + _FAREWELL_S
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

    @property
    def own_failures(self) -> list[int]:
        """Places of nodes that have failed, and not only because of another one."""
        return [at for at, seat in enumerate(self.seats) if seat.state not in GOOD and not seat.report.cause.follows]

    def told(self, reports: Mapping[int, Report]) -> str:
        """Return in words how nodes stand, by place."""
        parts = []
        for place, report in reports.items():
            stands = "leaves the job" if report.state is NodeState.EXCLUDED else f"is {report.state.value}"
            parts.append(f"{job_lines.node(place, self.seats[place].node.name)} {stands}: {report.cause.text}")
        return listed(parts, joint="; ")

    # -- how it ends ------------------------------------------------------------------------------------------

    def conclude(self, now_s: float, *, joining: int, awaits: bool = False, until_s: float | None = None) -> None:
        """End the cycle if it is over, or if ``joining`` nodes wait.

        Args:
            awaits: one of its launchers is away, and may know more.
            until_s: when a part may know more at the latest; None if none will.
        """
        self.alarm_s = None
        if self.outcome is not None:
            return
        self.joining, self._ended_s = joining, now_s
        if self.leaving and now_s >= self._farewell_s:
            leaving, self.leaving = self.leaving, {}
            for place, (goodbye, ends_job) in leaving.items():
                self.farewell(place, replace(goodbye, code=1), now_s, ends_job=ends_job)
        if self.shutdown is not None:
            self.outcome = Outcome.STOPPED
        elif until_s is not None:
            self.alarm_s = min(until_s, self._farewell_s) if self.leaving else until_s
        elif self.judged is not None:
            follows, own = self.seats[self.judged[1]].report.cause.follows, self.own_failures
            are_left_out = bool(own) and all(self.seats[place].state is NodeState.EXCLUDED for place in own)
            if follows and are_left_out and not (awaits or self.rules.min_healthy):
                self.judged = Outcome.MEMBERSHIP, own[0]  # which costs no restart
            self.outcome = self.judged[0]
        elif joining:
            self.outcome = Outcome.MEMBERSHIP
        elif self.leaving and set(self.healthy) <= self.leaving.keys():
            self.outcome = Outcome.SUCCEEDED
        elif self.leaving:
            self.alarm_s = self._farewell_s
        if self.outcome is not None and not self.rules.min_healthy:
            self.news.clear()

    @property
    def restarts(self) -> bool:
        """True once it is known that another cycle follows."""
        verdict = self.verdict if self.outcome is not None and self.shutdown is None else None
        return verdict is not None and verdict.decision.action is Action.RESTART

    def end(self, *, nodes_left: int) -> End:
        """Return what tells launchers that it is over, and whether another one is to follow, as far as is known now."""
        assert self.outcome is not None
        expected = self.verdict_on(nodes_left=nodes_left)
        restarts, by_themselves = expected.decision.action is Action.RESTART, expected.cause.rerun is not None
        text = expected.cause.text if self.outcome is Outcome.SUCCEEDED else ""
        return End(self.decision.cycle, self.outcome, restarts, text=text, by_themselves=by_themselves)

    def judge(self, now_s: float, *, nodes_left: int, awaits: bool = False, printer: str = "") -> None:
        """Reach the verdict, once it can be known.

        Args:
            awaits: one of its launchers is away, and may yet turn out to be the cause.
            printer: the launcher (instance) that prints it.
        """
        if self.outcome is None or self.verdict is not None:
            return
        first = self._first_failure()
        if self.outcome is Outcome.FAILED and self.judged is None and awaits:
            return  # it ended before this leader came
        by = first if self.judged is None else self.judged[1]
        if (
            self.outcome is Outcome.FAILED
            and by is not None
            and first is not None
            and self.seats[by].report.cause.follows
        ):
            is_known = first != by and self.seats[first].state is not NodeState.EXCLUDED
            until_s = self._ended_s + (_CAUSE_S if self.seats[by].report.cause.rerun is None else RERUN_S)
            if not is_known and (awaits or now_s < until_s):
                self.alarm_s = until_s if now_s < until_s else None
                return
        self.verdict = self.verdict_on(nodes_left=nodes_left, printer=printer)
        if self.rules.min_healthy:  # it lists them
            self.news.clear()

    @property
    def advance(self) -> JobProgress:
        """How far the job has got, this cycle included once there is a verdict on it."""
        has_failed = self.verdict is not None and self.verdict.outcome is Outcome.FAILED
        return self._after(self.verdict.reached) if self.verdict is not None and has_failed else self.decision.advance

    def _after(self, reached: Reached | None) -> JobProgress:
        return self.decision.advance.after(reached, restored=self.has_restored, has_snapshot=self.has_snapshot)

    def _first_failure(self) -> int | None:
        """Return the node that ended the cycle, or one whose end its own followed from, as far as the reports say."""
        by, own = None if self.judged is None else self.judged[1], self.own_failures
        if by is not None and (not own or not self.seats[by].report.cause.follows):
            return by
        bad = own or [place for place, seat in enumerate(self.seats) if seat.state not in GOOD]
        return min(bad, key=lambda place: _LIKELY.index(self.seats[place].state), default=None)

    # -- the verdict ------------------------------------------------------------------------------------------

    def verdict_on(self, *, nodes_left: int, printer: str = "") -> Verdict:
        """Return the verdict on a cycle whose outcome is known. ``nodes_left``: that could take part in another one."""
        seats, outcome = self.seats, self.outcome
        assert outcome is not None
        first = self._first_failure() if outcome is Outcome.FAILED else None
        # all ranks of the job end by Megatron's rerun state machine with the same code
        report = None if first is None else seats[first].report
        rerun = None if report is None else report.cause.rerun
        reached = None if report is None else report.reached
        if reached is None and first is not None and self.judged is not None:
            reached = seats[self.judged[1]].report.reached  # of the node that has only followed
        decision = self.rules.decide(
            outcome,
            restarts_before=self.decision.restarts,
            nodes_left=nodes_left if any(seat.state is NodeState.EXCLUDED for seat in seats) else None,
            advance=self._after(reached),
            rerun=rerun,
            restored=self.has_restored,
        )
        rotation = Rotation.NONE
        if report is not None and rerun in WANTS_ANOTHER_GPU and decision.action is Action.RESTART:
            rotation = Rotation.NODES if len(seats) > 1 else Rotation.NONE
            # a rank that got another GPU of its node may have taken it for the same one: it knows a GPU by the name of
            # the host and the number of the device, which may be 0 in each process. Another host is another GPU
            if report.ranks > 1 and not (rerun is Rerun.AGAIN and len(seats) > 1):
                rotation = Rotation.RANKS
            decision = replace(decision, change=_CHANGES[rotation])
        cause, node, names_nodes = self._cause(first)
        host = "" if node is None else seats[node].node.name
        if cause is self.found and (cause.rank is None or cause.host):
            host = cause.host  # the node that reports a hang is often only waiting
        return Verdict(
            cycle=self.decision.cycle,
            outcome=outcome,
            cause=replace(cause, host=host, rerun=rerun),
            decision=decision,
            node=node,
            nodes=len(seats),
            names_nodes=names_nodes,
            code=0 if decision.action is Action.FINISH else NO_PROGRESS_CODE if decision.no_progress else 1,
            stopped=bool(self.leaving),
            rotation=rotation,
            reached=reached,
            printer=printer,
        )

    def _cause(self, first: int | None) -> tuple[Cause, int | None, bool]:
        """Return why, the place of the node at fault, and True if the words name the nodes they are about."""
        seats, size = self.seats, len(self.seats)
        bad = {place: seat.report for place, seat in enumerate(seats) if seat.state not in GOOD}
        if self.outcome is Outcome.STOPPED and self.shutdown is not None:
            return Cause(kind=CauseKind.REQUEST, text=self.shutdown[1]), self.shutdown[0], False
        if self.outcome is Outcome.SUCCEEDED:
            text = f"the job finished on {size - len(bad)} of {counted(size, 'node')}: {self.told(bad)}" if bad else ""
            return Cause(kind=CauseKind.REQUEST, text=text), None, True
        if self.outcome is Outcome.MEMBERSHIP:
            left = {place: report for place, report in bad.items() if report.state is NodeState.EXCLUDED}
            text = self.told(left) or f"{counted(self.joining, 'node')} waiting to join"
            return Cause(text=text), next(iter(left), None), True
        report = Report(self.decision.cycle, NodeState.HEALTHY) if first is None else seats[first].report
        is_found = self.found is not None and report.cause is self.found
        if self.rules.min_healthy and size > 1 and bad and not (report.is_mixed or is_found):
            return Cause(text=f"{job_lines.good(size - len(bad), self.rules.min_nodes)}: {self.told(bad)}"), first, True
        if first is None:
            return Cause(text=job_lines.UNKNOWN_FAILURE), None, True
        return report.cause, first, is_found
