"""Evidence that monitors of this node collect on their ranks, within a bound. Pure."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from megatron_ft.diagnosis.exceptions import collective_raised_in
from megatron_ft.diagnosis.hang_messages import RankSnapshots
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Turn
from megatron_ft.link.messages.monitor_messages import Collect, Observation

_LAST_NOTES_NS = 150_000_000
"""Send snapshots this long before the deadline, to leave time for delivery."""
_PART_CHARS = 80_000
"""Characters of snapshots in one message, which has room for 1 MiB; one character may take 12 bytes."""


class EvidenceOnNode:
    """Evidence on ranks of one cycle, asked for from ``from_ns`` on. ``passive``: no rank gets a signal for it."""

    def __init__(self, cycle: NodeCycle, from_ns: int, *, passive: bool) -> None:
        self._cycle = cycle
        self._passive = passive
        self.until_ns = from_ns + round(EVIDENCE_S * 1e9)
        self.asked: set[int] = set()
        self.notes: dict[int, RankSnapshot] = {}
        """Snapshots by local rank."""

    def ask(
        self,
        local_ranks: Collection[int],
        turn: Turn,
        *,
        known: int | None = None,
        passive: bool | None = None,
        again_ns: int | None = None,
    ) -> None:
        """Have evidence collected on these ranks, except a ``known`` one, on which it is being collected already."""
        self.asked |= {*local_ranks}
        passive = self._passive if passive is None else passive
        order = Collect(self._cycle.cycle, self.until_ns, passive=passive, again_ns=again_ns)
        turn.order({*local_ranks} - {known}, order)

    def noted(self, local_rank: int, report: Observation) -> None:
        """Keep a monitor's snapshot of its rank. The first one counts: since then the rank may have been stopped."""
        note = self._cycle.own_note(local_rank, report.note)
        before = self.notes.get(local_rank, note)
        found_hung, progress = before.found_hung or note.found_hung, before.progress or note.progress
        self.notes[local_rank] = replace(before, found_hung=found_hung, progress=progress)

    @property
    def due_ns(self) -> int:
        """Time by which the snapshots have to be sent."""
        return self.until_ns - _LAST_NOTES_NS

    def is_complete(self, now_ns: int, *, is_sent: bool = True) -> bool:
        """Return True if all has come, or the bound is near; ``is_sent`` False: is over."""
        due_ns = self.due_ns if is_sent else self.until_ns
        return now_ns >= due_ns or self.asked & self._cycle.observed <= self.notes.keys()

    def of_all(self, turn: Turn) -> list[RankSnapshot]:
        """Return the snapshots of all ranks that were started."""
        return [self.notes.get(each) or self._unseen(each, turn) for each in sorted(self._cycle.started)]

    def tell(self, turn: Turn) -> None:
        """Send the snapshots to the coordinator, in as many messages as needed. One snapshot always fits."""
        parts: list[tuple[RankSnapshot, ...]] = [()]
        room = _PART_CHARS
        for note in self.of_all(turn):
            room -= (size := len(repr(note)))
            if room < 0 and parts[-1]:
                parts.append(())
                room = _PART_CHARS - size
            parts[-1] += (note,)
        last = parts[-1]
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
