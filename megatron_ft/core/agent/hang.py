"""Diagnosis of a hang on one node: evidence on all its ranks is collected, within a bound, and sent on. Pure.

The coordinator asks all nodes for theirs, and finds which rank is the cause. The monitor that found the hang ends its
rank when the cycle is ended, or when its own bound is over, so that missing evidence delays nothing. Under
``min-healthy`` each node decides for itself. Ranks that weren't found hung may go on living: nothing is sent to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from megatron_ft.core.agent.effects import OrderMonitor, Write
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.turn import Options, Turn
from megatron_ft.core.facts.launcher import Cause, CauseKind, Finding, RankExited
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.messages.monitor_messages import Collect, Release
from megatron_ft.diagnosis.cycle_cause import LOST_PEER
from megatron_ft.diagnosis.exceptions import collective_raised_in
from megatron_ft.diagnosis.exits import one_line
from megatron_ft.diagnosis.hang_diagnosis import blamed
from megatron_ft.diagnosis.hang_messages import Hang, RankSnapshots
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot
from megatron_ft.learning.launcher_part import LauncherLearning
from megatron_ft.learning.messages import Killed

LAST_NOTES_NS = 150_000_000
"""Send snapshots this long before the deadline, to leave time for delivery."""
_PART_CHARS = 80_000
"""Characters of snapshots in one message, which has room for 1 MiB; one character may take 12 bytes."""


class NodeHangDiagnosis:
    """The diagnosis of a hang in one cycle, on this node.

    ``learning`` is told of each learned timeout that ends a rank.
    """

    def __init__(self, options: Options, record: CycleRecord, learning: LauncherLearning) -> None:
        self._options = options
        self._learning = learning
        self._record = record
        self._decides = options.min_healthy
        self._notes: dict[int, RankSnapshot] = {}
        """Snapshots by local rank."""
        self._verdict: RankHung | None = None
        """First verdict of this node."""
        self._bound_ns: int | None = None
        self._asked: set[int] = set()
        self._is_told = False
        self._is_over = False

    def found(self, verdict: RankHung, turn: Turn, *, is_seen: bool = True) -> None:
        """Start the diagnosis of a hung rank. ``is_seen``: its monitor found it, and is collecting evidence already."""
        if self._is_over:
            turn.do(Release(self._record.cycle))
            return
        if verdict.learned:
            kill = Killed(verdict.cycle, verdict.timed, verdict.timeout_s, verdict.was_extended)
            self._learning.killed(kill, turn)
        self._verdict = self._verdict or verdict
        from_ns = verdict.at_ns if is_seen else turn.now_ns
        self.begin(turn, from_ns=from_ns, known={verdict.local_rank} if is_seen else set())

    def lost_peer(self, end: RankExited, turn: Turn) -> None:
        """Find the rank that another one waited for or lost, before all are ended."""
        if self._is_over or self._bound_ns is not None or self._options.min_healthy or self._options.observe_only:
            return
        self._verdict = RankHung(
            rank=end.rank,
            cycle=end.cycle,
            local_rank=end.local_rank,
            kind=LOST_PEER,
            since_ns=turn.now_ns,
            elapsed_s=0.0,
            timeout_s=0.0,
            iteration=end.iteration,
            at_ns=turn.now_ns,
            error=one_line(end.error or ""),
        )
        self.begin(turn, from_ns=turn.now_ns, known=set())

    def explain(self) -> None:
        """Stop deciding: a rank of this node has failed by itself, which explains the lost peers."""
        if self._decides and self._verdict is not None and self._verdict.kind == LOST_PEER:
            self._is_over = True

    def noted(self, note: RankSnapshot, turn: Turn) -> None:
        """Record a monitor's snapshot of its rank."""
        if self._is_over:
            turn.do(Release(self._record.cycle))
            return
        if self._bound_ns is None:
            return  # collected for another reason; evidence from before the verdict says little about the hang
        before = self._notes.get(note.local_rank)
        if before is not None:
            # the first evidence counts: since then a rank may have been stopped by its monitor
            note = msgspec.structs.replace(before, found_hung=before.found_hung or note.found_hung)
        self._notes[note.local_rank] = note

    def close(self, turn: Turn) -> None:
        """End the diagnosis with the cycle: collect no more evidence, and let the monitors end the hung ranks."""
        self._is_over = True
        turn.do(Release(self._record.cycle))

    @property
    def is_deciding(self) -> bool:
        """True while this node decides and the cause may still become known: its state isn't reported before."""
        return self._decides and self._bound_ns is not None and not self._is_over

    @property
    def alarm_ns(self) -> int | None:
        """Latest time of the next ``go_on``."""
        if self._bound_ns is None or self._is_told or self._is_over:
            return None
        return self._bound_ns - LAST_NOTES_NS

    def go_on(self, turn: Turn) -> None:
        """Send the snapshots, or decide, once evidence on all ranks has come, or the bound is near."""
        alarm_ns = self.alarm_ns
        has_all = self._asked & self._record.observed <= self._notes.keys()
        if alarm_ns is None or (turn.now_ns < alarm_ns and not has_all):
            return
        self._is_told = True
        notes = complete_notes(self._record, self._notes, turn)
        if not self._decides:
            tell_notes(turn, self._record.cycle, notes)
        elif self._verdict is not None:
            found = blamed(notes, self._verdict, are_all=True, several=False)
            self._record.blame(found)
            if found is not None:
                turn.do(*write_finding(self._record.cycle, found))
            self.close(turn)

    def begin(self, turn: Turn, *, from_ns: int, known: set[int]) -> None:
        """Have evidence collected on all ranks but ``known`` ones, on which it is being collected."""
        if self._bound_ns is not None or self._is_over:
            return
        self._bound_ns = from_ns + round(EVIDENCE_S * 1e9)
        if not self._decides and self._verdict is not None:
            # a job isn't given up for timeouts of our own making
            reached = self._record.reached(turn.seen) if self._verdict.is_certain else None
            turn.do(Hang(self._record.cycle, self._verdict, reached))
        self._asked = self._record.observed
        for local_rank in sorted(self._asked - known):
            order = Collect(self._record.cycle, self._bound_ns, passive=self._options.min_healthy)
            turn.do(OrderMonitor(local_rank, order))


def write_finding(cycle: int, cause: Cause) -> list[Write]:
    """Log the cause of a hang, if the evidence on all ranks adds something. One launcher of the job does that."""
    if cause.detail and cause.kind in (CauseKind.HANG, CauseKind.CRASH):
        return [Write(Finding(cycle=cycle, rank=cause.rank, text=cause.detail))]
    return []


def complete_notes(record: CycleRecord, notes: Mapping[int, RankSnapshot], turn: Turn) -> list[RankSnapshot]:
    """Return the snapshots (by local rank) of all ranks that were started."""
    return [notes.get(local_rank) or _note_unseen(record, local_rank, turn) for local_rank in sorted(record.started)]


def _note_unseen(record: CycleRecord, local_rank: int, turn: Turn) -> RankSnapshot:
    """Return the known facts of a rank without evidence from its monitor."""
    board, ended = turn.seen.boards[local_rank], record.exits.get(local_rank)
    end = ended or record.end_of_its_exception(local_rank, turn.seen)
    verdict = record.overdue.get(local_rank)
    if verdict is not None and end is not None and end.raised_at_ns > verdict.at_ns:
        end = None  # it raised because it was being ended
    raised_ns = turn.now_ns if end is None or not end.raised_at_ns else end.raised_at_ns
    note = RankSnapshot(
        rank=record.ranks[local_rank],
        local_rank=local_rank,
        pid=record.started[local_rank].pid or 0,
        iteration=None if board is None else board.iteration,
        closing=board is not None and board.closing,
        gone=ended is not None,
        exitcode=None if ended is None else ended.exitcode,
        raised="" if end is None else end.error or "",
        raised_s=(turn.now_ns - raised_ns) / 1e9,
        frame="" if end is None else end.where,
        waits_in="" if end is None or not end.error else collective_raised_in(turn.seen.words[local_rank].exception),
    )
    return note if verdict is None else _as_found(note, verdict)


def _as_found(note: RankSnapshot, verdict: RankHung) -> RankSnapshot:
    """Return the snapshot as the monitor found the rank: that it has ended since is the monitor's doing."""
    return msgspec.structs.replace(
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


def tell_notes(turn: Turn, cycle: int, notes: Iterable[RankSnapshot], *, passive: bool = False) -> None:
    """Send the snapshots to the coordinator, in as many messages as needed. One snapshot always fits."""
    parts: list[tuple[RankSnapshot, ...]] = [()]
    room = _PART_CHARS
    for note in notes:
        room -= (size := len(repr(note)))
        if room < 0 and parts[-1]:
            parts.append(())
            room = _PART_CHARS - size
        parts[-1] += (note,)
    turn.do(*(RankSnapshots(cycle, part, passive, more=part is not parts[-1]) for part in parts))
