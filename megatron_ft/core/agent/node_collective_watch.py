"""Watch of collectives on one node: when to ask for evidence because none has completed, and what follows.

Each rank writes torch's counts of its collectives to its board (`docs/watch-collectives.md`). When none of this node's
ranks has begun or completed one for ``collectives_timeout_s``, the coordinator is asked to collect evidence on the
ranks of all nodes, which go on; its answer is reported, and, if the user wants that, the cycle is ended. Ranks with an
enforced timeout in force are left to that. Counts of ranks that have ended their monitoring are out of date and don't
count as silence. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ft.core.agent import cycle_lines
from megatron_ft.core.agent.effects import OrderMonitor, Write
from megatron_ft.core.agent.hang import LAST_NOTES_NS, complete_notes, tell_notes
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.turn import LATE_NS, Options, Turn
from megatron_ft.core.board.intervals import running_intervals
from megatron_ft.core.facts.launcher import NoCollective
from megatron_ft.core.facts.shared import RankHung
from megatron_ft.core.messages.monitor_messages import Collect
from megatron_ft.core.pauses import Pauses
from megatron_ft.diagnosis.cycle_cause import COLLECTIVES
from megatron_ft.diagnosis.hang_messages import Hang, Reviewed
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot

_SHARE_OF_GROUP = 0.5
"""Share of a group's own timeout, which ends the job: the report comes before that."""
_UNKNOWN_NS = 300_000_000_000
"""Default if the timeout of the process group isn't known: half of NCCL's 600 s."""
_LOOKS_PER_TIMEOUT = 8
_OFTEST_NS, _SELDOMEST_NS = 250_000_000, 10_000_000_000
_ANSWER_NS = 15_000_000_000
"""Time for the coordinator's answer; later it may have been replaced, or have found that other nodes' ranks go on."""


@dataclass
class _Collecting:
    """Collection of evidence on the ranks of this node, until ``until_ns`` at the latest."""

    until_ns: int
    asked: set[int]
    notes: dict[int, RankSnapshot] = field(default_factory=dict)


_LOOK_NS = 700_000_000
"""Time between two observations of a rank."""


class NodeCollectiveWatch:
    """The watch of one cycle on this node, from the start of its ranks."""

    def __init__(self, options: Options, record: CycleRecord, pauses: Pauses, now_ns: int) -> None:
        self._options = options
        self._record = record
        self._pauses = pauses
        self._timeout_ns = self._every_ns = 0
        self._set_timeout(None if options.collectives_timeout_s is None else round(options.collectives_timeout_s * 1e9))
        self._looked_ns = now_ns
        self._due_ns = now_ns + self._every_ns
        self._moved_ns = now_ns
        """Time at which the last collective was seen to begin or complete, as far as that counts."""
        self._excused_ns = 0
        """Nanoseconds since then in which the node was stopped, which don't count."""
        self._grouped: set[int] = set()
        """Local ranks that had a process group."""
        self._is_asked = False
        """True while the coordinator's review is awaited."""
        self._ask_again_ns = 0
        self._is_told = False
        """True once this silence was reported to the user."""
        self._collecting: _Collecting | None = None
        self._is_over = False
        """True once the launcher was asked to stop: nothing is due any more."""

    @property
    def alarm_ns(self) -> int | None:
        """Latest time of the next ``go_on``."""
        times = [self._due_ns] if self._is_on else []
        if self._collecting is not None:
            times.append(self._collecting.until_ns - LAST_NOTES_NS)
        return min(times, default=None)

    @property
    def _is_on(self) -> bool:
        return self._options.watches_collectives and not self._is_over

    # -- events -------------------------------------------------------------------------------------------------

    def excuse_stop(self, now_ns: int) -> None:
        """Start anew after a stop of the whole node: no time before it counts."""
        self._begin_anew(now_ns)

    def collect(self, turn: Turn, *, looks: bool = False) -> None:
        """Have evidence collected on the ranks of this node, which go on running.

        ``looks``: and what they do meanwhile.
        """
        if self._collecting is None:
            alive = self._record.observed
            self._collecting = _Collecting(turn.now_ns + round(EVIDENCE_S * 1e9), alive)
            for local_rank in sorted(alive):
                again_ns = turn.now_ns + _LOOK_NS if looks else None
                order = Collect(self._record.cycle, self._collecting.until_ns, passive=True, again_ns=again_ns)
                turn.do(OrderMonitor(local_rank, order))

    def noted(self, note: RankSnapshot) -> None:
        """Record a monitor's snapshot of its rank."""
        if self._collecting is not None and note.local_rank in self._collecting.asked:
            self._collecting.notes[note.local_rank] = note

    def reviewed(self, review: Reviewed, place: int, turn: Turn) -> RankHung | None:
        """Report the review of all ranks; the node that had asked logs it. ``place`` is this node's.

        Return the verdict for which this node is to end the cycle, None without one.
        """
        options, is_asker = self._options, review.asker == place
        ends = options.ends_for_collectives and review.is_waited and not options.observe_only
        self._is_told, self._is_asked = True, False
        turn.say_for_all(cycle_lines.no_collective(review, ends=ends))
        if is_asker:
            silence = NoCollective(
                cycle=self._record.cycle,
                rank=review.rank,
                elapsed_s=review.elapsed_s,
                timeout_s=review.timeout_s,
                text=review.text,
                ends=ends,
            )
            turn.do(Write(silence))
        is_own = review.rank in self._record.ranks
        if options.min_healthy and review.rank is not None:
            is_asker = is_own  # each node ends its own ranks
        if not (ends and is_asker and self._record.running):
            return None
        local_rank = self._record.ranks.index(review.rank) if is_own else min(self._record.running)
        return self._verdict(local_rank, review.elapsed_s, turn.now_ns)

    # -- what is due --------------------------------------------------------------------------------------------

    def go_on(self, turn: Turn, *, is_stopping: bool) -> None:
        """Send the snapshots once they are complete, and check for silence when that is due."""
        collecting = self._collecting
        if collecting is not None and (
            turn.now_ns >= collecting.until_ns - LAST_NOTES_NS or not collecting.notes.keys() < collecting.asked
        ):
            self._collecting = None
            tell_notes(turn, self._record.cycle, complete_notes(self._record, collecting.notes, turn), passive=True)
        self._is_over = self._is_over or is_stopping
        if not self._is_on or turn.now_ns < self._due_ns:
            return
        if turn.now_ns - self._due_ns > LATE_NS:
            self._excused_ns += turn.now_ns - self._looked_ns - self._pauses.within(self._looked_ns, turn.now_ns)
        self._looked_ns, self._due_ns = turn.now_ns, turn.now_ns + self._every_ns
        if self._pauses.since_ns is None:
            self._judge(turn)

    def _set_timeout(self, timeout_ns: int | None) -> None:
        self._timeout_ns = _UNKNOWN_NS if timeout_ns is None else timeout_ns
        self._every_ns = min(max(self._timeout_ns // _LOOKS_PER_TIMEOUT, _OFTEST_NS), _SELDOMEST_NS)

    def _judge(self, turn: Turn) -> None:
        counts = {local_rank: turn.seen.collectives[local_rank] for local_rank in sorted(self._record.observed)}
        known = {local_rank: found for local_rank, found in counts.items() if found is not None}
        is_leaving = any(found is None and local_rank in self._grouped for local_rank, found in counts.items())
        self._grouped |= known.keys()
        # a rank that has ended its monitoring may go on, but its board keeps the counts of that moment
        closing = {lr for lr in known if (board := turn.seen.boards[lr]) is not None and board.closing}
        judged = {lr: found for lr, found in known.items() if lr not in closing}
        if not judged or is_leaving:  # no monitored rank has a process group, or one has destroyed its group
            self._begin_anew(turn.now_ns)
            return
        if self._options.collectives_timeout_s is None:
            groups_ns = [found.group_timeout_ns for found in judged.values() if found.group_timeout_ns is not None]
            self._set_timeout(round(_SHARE_OF_GROUP * min(groups_ns)) if groups_ns else None)
        newest_ns = max(found.moved_ns for found in judged.values())
        if newest_ns > self._moved_ns:
            if self._is_told:
                turn.say_for_all(cycle_lines.collectives_go_on((newest_ns - self._moved_ns) / 1e9))
            self._begin_anew(newest_ns)
        silent_ns = turn.now_ns - self._moved_ns - self._excused_ns
        silent_ns -= self._pauses.within(self._moved_ns, turn.now_ns)
        left_ns = self._timeout_ns - silent_ns
        if left_ns > 0:
            self._due_ns = turn.now_ns + min(self._every_ns, left_ns)
        elif not self._is_told and turn.now_ns >= self._ask_again_ns:
            boards = (turn.seen.boards[local_rank] for local_rank in judged)
            # an enforced timeout that applies to each of these ranks now does the rest
            if not all(board and any(each.enforced for each in running_intervals(board)) for board in boards):
                self._ask(min(judged), silent_ns, turn)

    def _begin_anew(self, now_ns: int) -> None:
        self._moved_ns, self._excused_ns, self._ask_again_ns = now_ns, 0, 0
        self._is_told = self._is_asked = False

    def _ask(self, local_rank: int, silent_ns: int, turn: Turn) -> None:
        if self._is_asked:  # no answer: ranks of other nodes go on, or another coordinator has taken over
            self._is_asked, self._ask_again_ns = False, turn.now_ns + self._timeout_ns
            return
        self._is_asked, self._ask_again_ns = True, turn.now_ns + _ANSWER_NS
        verdict = self._verdict(local_rank, silent_ns / 1e9, turn.now_ns)
        turn.do(Hang(self._record.cycle, verdict, passive=True))

    def _verdict(self, local_rank: int, elapsed_s: float, now_ns: int) -> RankHung:
        return RankHung(
            rank=self._record.ranks[local_rank],
            cycle=self._record.cycle,
            local_rank=local_rank,
            kind=COLLECTIVES,
            since_ns=max(0, now_ns - round(elapsed_s * 1e9)),
            elapsed_s=elapsed_s,
            timeout_s=self._timeout_ns / 1e9,
            at_ns=now_ns,
        )
