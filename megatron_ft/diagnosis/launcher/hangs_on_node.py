"""A hang on one node: evidence on all its ranks is collected, within a bound, and sent on. Pure.

The coordinator asks all nodes for theirs, and finds which rank is the cause. The monitor that found the hang ends its
rank when the cycle is ended, or when its own bound is over, so that missing evidence delays nothing. Under
``min-healthy`` it ends its rank at once: the ranks of all nodes were examined before (`LastLook`), the others go on.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_ft.diagnosis.cycle_cause import LOST_PEER, describe_hang_and_iteration
from megatron_ft.diagnosis.exceptions import collective_raised_in
from megatron_ft.diagnosis.exits import is_secondary_failure, one_line
from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Hang, RankSnapshots, Reviewed
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot
from megatron_ft.launcher.rules.events import Write
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Options, Turn
from megatron_ft.learning.launcher.part import LauncherLearning
from megatron_ft.learning.messages import Killed
from megatron_ft.link.base.launcher_part import LauncherPart
from megatron_ft.link.base.times import earliest
from megatron_ft.link.facts.launcher import Cause, CauseKind, Finding, RankExited
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages.monitor_messages import Collect, Observation, RankReport, Release

_LOOK_NS = 700_000_000
"""Time between two observations of a rank."""
_LAST_NOTES_NS = 150_000_000
"""Send snapshots this long before the deadline, to leave time for delivery."""
_PART_CHARS = 80_000
"""Characters of snapshots in one message, which has room for 1 MiB; one character may take 12 bytes."""


class HangsOnNode(LauncherPart):
    """Hangs of the ranks of one node. ``learning`` is told of each learned timeout that ends or reports a rank."""

    HEARS = DiagnoseHang | Reviewed

    def __init__(self, options: Options, learning: LauncherLearning) -> None:
        self._options = options
        self._learning = learning
        self._would_hang: set[tuple[str, int | None]] = set()
        """Intervals reported to the user as hangs that end nothing."""

    def begin(self, cycle: NodeCycle, turn: Turn) -> None:
        self._cycle = cycle
        self._evidence: EvidenceOnNode | None = None
        """Evidence for the cause of the cycle's end."""
        self._review: EvidenceOnNode | None = None
        """Evidence on ranks that run on."""
        self._asked: set[tuple[str, int | None]] = set()
        """Overdue intervals (what is timed, and the iteration) of ranks that aren't ended."""

    # -- what the leader asks for, and tells ----------------------------------------------------------------------

    def hear(self, event: DiagnoseHang | Reviewed, turn: Turn) -> None:
        if turn.runs != event.cycle:
            return
        if isinstance(event, Reviewed):
            interval = event.reports, event.verdict.iteration
            if event.reports and interval not in self._would_hang:
                self._would_hang.add(interval)
                is_observing = self._options.given.observe_only
                follows = (
                    ": not killed (observe-only)" if is_observing else "; set timeouts or --ft-learn on to restart"
                )
                turn.say_for_all(f"would be a hang: {event.text}{follows}")
                turn.do(Write(event.record()))
                if event.verdict.learned:
                    self._learning.reported(event.reports, turn)
        elif not event.passive:
            self._begin(turn, None)
        elif self._review is None and self._cycle.is_started:
            again_ns = turn.now_ns + _LOOK_NS if event.looks else None
            self._review = EvidenceOnNode(self._cycle, turn, from_ns=turn.now_ns, passive=True, again_ns=again_ns)

    # -- what monitors say ----------------------------------------------------------------------------------------

    def hear_monitor(self, local_rank: int, report: RankReport, turn: Turn) -> None:
        if isinstance(report, RankHung) and report.observed_only and not report.learned:
            turn.say(f"{describe_hang_and_iteration(report)}: not killed (observe-only)")
        if not self._cycle.has(local_rank, report.cycle):
            return
        if isinstance(report, Observation):
            if self._review is not None:
                self._review.noted(local_rank, report)
            if self._evidence is not None:  # evidence from before the verdict says little about the hang
                self._evidence.noted(local_rank, report)
        elif isinstance(report, RankHung) and local_rank in self._cycle.started:
            if not report.observed_only:
                self._cycle.found_hung(report, turn, by_monitor=True)
                self.found(report, turn)
            elif (report.timed, report.iteration) not in self._asked:
                # all nodes are asked what keeps a rank that isn't ended
                self._asked.add((report.timed, report.iteration))
                turn.do(Hang(self._cycle.cycle, report, passive=True))

    def found(self, verdict: RankHung, turn: Turn) -> None:
        """Start the diagnosis of a hung rank."""
        if turn.runs is None:
            turn.do(Release(self._cycle.cycle))
            return
        if verdict.learned:
            kill = Killed(verdict.cycle, verdict.timed, verdict.timeout_s, verdict.was_extended)
            self._learning.killed(kill, turn)
        if self._options.min_healthy:
            turn.order([verdict.local_rank], Release(self._cycle.cycle))
            return
        self._begin(turn, verdict)

    def exited(self, end: RankExited, turn: Turn) -> None:
        """Find the rank that another one waited for or lost, before all are ended."""
        is_left_alone = self._options.min_healthy or self._options.given.observe_only
        if turn.runs is None or self._evidence is not None or is_left_alone or not is_secondary_failure(end):
            return
        if self._cycle.own_failure(turn.seen) is not None:
            return  # it explains the lost peer
        error = one_line(end.error or "")
        verdict = self._cycle.verdict(end.local_rank, LOST_PEER, turn, iteration=end.iteration, error=error)
        self._begin(turn, verdict)

    # -- evidence -------------------------------------------------------------------------------------------------

    def _begin(self, turn: Turn, verdict: RankHung | None) -> None:
        """Have evidence collected on all ranks. ``verdict``: of this node; None if another one has found a hang."""
        if self._evidence is not None:
            return
        if verdict is not None:
            # a job isn't given up for timeouts of our own making
            reached = self._cycle.reached(turn.seen) if verdict.is_certain else None
            turn.do(Hang(self._cycle.cycle, verdict, reached))
        from_ns = turn.now_ns if verdict is None else verdict.at_ns
        self._evidence = EvidenceOnNode(self._cycle, turn, from_ns=from_ns, passive=False)

    @property
    def alarm_ns(self) -> int | None:
        return earliest(*(each.due_ns for each in (self._evidence, self._review) if each is not None))

    def tick(self, turn: Turn, *, is_stopping: bool) -> None:
        """Send the snapshots once evidence on all ranks has come, or the bound is near."""
        for each in (self._review, self._evidence):
            if each is not None and each.is_complete(turn.now_ns):
                each.tell(turn)
        if self._review is not None and self._review.due_ns is None:
            self._review = None

    def ending(self, turn: Turn) -> None:
        """Collect no more evidence, and let the monitors end the hung ranks."""
        self._evidence = None
        turn.do(Release(self._cycle.cycle))

    def blamed(self, cause: Cause, turn: Turn) -> None:
        """Log the cause of a hang, if the evidence on all ranks adds something. One launcher of the job does that."""
        if cause.detail and cause.kind in (CauseKind.HANG, CauseKind.CRASH):
            turn.do(Write(Finding(cycle=self._cycle.cycle, rank=cause.rank, text=cause.detail)))


class EvidenceOnNode:
    """Evidence on ranks of one cycle, asked for from ``from_ns`` on. ``passive``: no rank gets a signal for it."""

    def __init__(
        self,
        cycle: NodeCycle,
        turn: Turn,
        *,
        from_ns: int,
        passive: bool,
        again_ns: int | None = None,
    ) -> None:
        """Have evidence collected on all ranks: a monitor that has its own already sends it again."""
        self._cycle = cycle
        self._passive = passive
        until_ns = from_ns + round(EVIDENCE_S * 1e9)
        self.due_ns: int | None = until_ns - _LAST_NOTES_NS
        """Time by which the snapshots have to be sent; None once they are."""
        self._asked = cycle.observed
        self.notes: dict[int, RankSnapshot] = {}
        """Snapshots by local rank."""
        turn.order(self._asked, Collect(cycle.cycle, until_ns, passive=passive, again_ns=again_ns))

    def noted(self, local_rank: int, report: Observation) -> None:
        """Keep a monitor's snapshot of its rank. The first one counts: since then the rank may have been stopped."""
        note = self._cycle.own_note(local_rank, report.note)
        before = self.notes.get(local_rank, note)
        found_hung, progress = before.found_hung or note.found_hung, before.progress or note.progress
        self.notes[local_rank] = replace(before, found_hung=found_hung, progress=progress)

    def is_complete(self, now_ns: int) -> bool:
        are_all = self._asked & self._cycle.observed <= self.notes.keys()
        return self.due_ns is not None and (are_all or now_ns >= self.due_ns)

    def tell(self, turn: Turn) -> None:
        """Send the snapshots of all ranks that were started, in as many messages as needed. One always fits."""
        parts: list[tuple[RankSnapshot, ...]] = [()]
        for local_rank in sorted(self._cycle.started):
            part = (*parts[-1], self.notes.get(local_rank) or self._unseen(local_rank, turn))
            if len(part) > 1 and len(repr(part)) > _PART_CHARS:
                parts.append(part[-1:])
            else:
                parts[-1] = part
        last, self.due_ns = parts[-1], None
        turn.do(*(RankSnapshots(self._cycle.cycle, part, self._passive, more=part is not last) for part in parts))

    def _unseen(self, local_rank: int, turn: Turn) -> RankSnapshot:
        """Return the known facts of a rank without evidence from its monitor."""
        cycle, board = self._cycle, turn.seen.boards[local_rank]
        ended, verdict = cycle.exits.get(local_rank), cycle.overdue.get(local_rank)
        end = ended or cycle.end_of_its_exception(local_rank, turn.seen)
        if verdict is not None and end is not None and end.raised_at_ns > verdict.at_ns:
            end = None  # it raised because it was being ended
        raised_ns = turn.now_ns if end is None or not end.raised_at_ns else end.raised_at_ns
        note = RankSnapshot(
            rank=cycle.ranks[local_rank],
            local_rank=local_rank,
            pid=cycle.started[local_rank].pid or 0,
            iteration=None if board is None else board.iteration,
            closing=board is not None and board.closing,
            gone=ended is not None,
            exitcode=None if ended is None else ended.exitcode,
            raised="" if end is None else end.error or "",
            raised_s=(turn.now_ns - raised_ns) / 1e9,
            frame="" if end is None else end.where,
            waits_in=collective_raised_in(turn.seen.words[local_rank].exception) if end and end.error else "",
        )
        if verdict is None:
            return note
        return replace(  # as the monitor found the rank: that it has ended since is the monitor's doing
            note,
            iteration=verdict.iteration if note.iteration is None else note.iteration,
            section=verdict.section,
            open_s=verdict.elapsed_s,
            timeout_s=verdict.timeout_s,
            found_hung=True,
            state="T" if verdict.stopped else "",
            gone=False,
            exitcode=None,
        )
