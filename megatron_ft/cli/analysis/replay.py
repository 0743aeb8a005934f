"""Replay of past runs with other timeouts: wrongly terminated ranks, and the delay in hangs. Pure.

A learned timeout is learned again here, from the intervals of the logs, at the moments at which the run saved (at the
end of each cycle, if it never did). The logs continue after a rank that would have been ended, unlike the job.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ft.cli.analysis.intervals import HEARTBEATS, OUT_OF_SECTION, ended, judged
from megatron_ft.cli.analysis.timeline import Timeline, Track
from megatron_ft.cli.logs.progress import Int64s
from megatron_ft.core.board.intervals import CHECKPOINTING, FIRST_INTERVALS, STEP
from megatron_ft.core.timeouts.budget_rule import after_update, begin_cycle, learn
from megatron_ft.core.timeouts.known import Known
from megatron_ft.core.timeouts.sketch import NO_INTERVAL, Sketch, bounded, merge
from megatron_ft.core.timeouts.tail import bucket_of

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
_LEAST = 16
"""Least number of a rank's intervals before anything is learned from them."""


class ReplayedRule:
    """Timeout of one section, chosen by the user. Times are seconds; None is no timeout."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.first_s = timeout_s
        """Timeout of the first intervals of a cycle."""

    def begin_cycle(self) -> None:
        """Note that all processes are new."""

    def learn(self, took_s: Sequence[Sequence[float]]) -> None:
        """Learn from all intervals of this cycle so far, by rank."""


class LearnedRule(ReplayedRule):
    """Timeouts that a rule of this name would have learned."""

    def __init__(self, name: str, factor: float) -> None:
        super().__init__(None)
        self._name, self._factor = name, factor
        self._known = Known()

    @property
    def reference_s(self) -> float | None:
        """Return the timeout that nvidia-resiliency-ext would have learned; it has no floor."""
        return self._known.reference_s

    def begin_cycle(self) -> None:
        self._known = begin_cycle(self._known)

    def learn(self, took_s: Sequence[Sequence[float]]) -> None:
        sketch = merge(_sketch(of_rank) for of_rank in took_s)
        self._known = after_update(self._known, sketch, factor=self._factor)
        found = learn(self._known, sketch, factor=self._factor, rule=self._name, cap_s=None, previous_s=self.timeout_s)
        if found is not None:
            self.timeout_s, self.first_s = found.timeout_s, found.first_s


def _sketch(took_s: Sequence[float]) -> Sketch:
    counts: dict[int, float] = {}
    for length_s in took_s[FIRST_INTERVALS:]:
        bucket = bucket_of(length_s)
        counts[bucket] = counts.get(bucket, 0.0) + 1.0
    return Sketch(
        ended=len(took_s),
        longest_s=max(took_s, default=NO_INTERVAL),
        first_s=max(took_s[:FIRST_INTERVALS], default=NO_INTERVAL),
        tail=bounded(counts),
    )


@dataclass(frozen=True, kw_only=True)
class WouldEnd:
    """A healthy interval above its timeout. Seconds; ``end_ns`` is wall time."""

    rank: int
    cycle: int
    end_ns: int
    took_s: float
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Hung:
    """A hang in the logs.

    Args:
        noticed_s: seconds until it was detected.
        would_s: seconds until it would have been detected; None: never.
    """

    rank: int
    cycle: int
    noticed_s: float
    would_s: float | None


@dataclass(kw_only=True)
class Replayed:
    """Result of one section under one rule."""

    name: str
    judged: int = 0
    """Number of intervals that had a timeout."""
    unjudged: int = 0
    would_end: list[WouldEnd] = field(default_factory=list)
    """The longest interval of each cycle: a rank is terminated once per cycle."""
    too_long: int = 0
    """Number of intervals above their timeout, of all ranks."""
    hangs: list[Hung] = field(default_factory=list)
    last_s: float | None = None
    """Timeout at the end: the greater of that and the one of first intervals."""


def replay(timelines: Sequence[Timeline], name: str, rule: ReplayedRule) -> Replayed:
    """Replay one section; OUT_OF_SECTION is the time in none."""
    found = Replayed(name=name)
    for timeline in timelines:
        for cycle in sorted(timeline.tracks_by_cycle):
            tracks = timeline.tracks_by_cycle[cycle]
            rule.begin_cycle()
            _play_cycle(timeline, tracks, name, rule, found)
    if rule.timeout_s is not None:
        found.last_s = max(rule.timeout_s, rule.first_s or 0.0)
    return found


def _play_cycle(timeline: Timeline, tracks: Sequence[Track], name: str, rule: ReplayedRule, found: Replayed) -> None:
    of_ranks = [(track, *ended(timeline, track, name)) for track in tracks if track.spans is not None]
    hang = min((t.hang for t in tracks if t.hang is not None), key=lambda hang: hang.at_ns, default=None)
    worst: WouldEnd | None = None
    seen = 0
    for from_ns, to_ns in _between_saves(timeline, tracks):
        is_new = False
        took: list[list[float]] = []
        if hang is not None and from_ns <= hang.at_ns < to_ns:
            _note_hang(tracks, name, rule, found)
        for track, end_ns, took_ns in of_ranks:
            begin, end = (int(at) for at in np.searchsorted(end_ns, (from_ns, to_ns), side="right"))
            middle = min(max(begin, FIRST_INTERVALS), end)
            took_s = took_ns / 1e9
            took.append(took_s[:end].tolist())
            is_new = is_new or end > begin
            for part, limit in ((slice(begin, middle), rule.first_s), (slice(middle, end), rule.timeout_s)):
                this = _judge(track, end_ns[part], took_s[part], limit, found)
                worst = this if worst is None or (this is not None and this.took_s > worst.took_s) else worst
            seen = max(seen, end)
        if (name != STEP or seen >= _LEAST) and is_new:
            rule.learn(took)
    if worst is not None:
        found.would_end.append(worst)


def _judge(track: Track, end_ns: Int64s, took_s: Floats, limit_s: float | None, found: Replayed) -> WouldEnd | None:
    """Count these intervals. Return the longest if it is above the limit."""
    if limit_s is None:
        found.unjudged += len(took_s)
        return None
    found.judged += len(took_s)
    too_long = int((took_s > limit_s).sum())
    found.too_long += too_long
    if not too_long:
        return None
    at = int(took_s.argmax())
    return WouldEnd(
        rank=track.rank, cycle=track.cycle, end_ns=int(end_ns[at]), took_s=float(took_s[at]), timeout_s=limit_s
    )


def _note_hang(tracks: Sequence[Track], name: str, rule: ReplayedRule, found: Replayed) -> None:
    """Note the first verdict of the cycle, if it was about this section."""
    first = min((t for t in tracks if t.hang is not None), key=lambda t: t.hang.at_ns if t.hang else 0)
    if judged(first) != name or first.hang is None:
        return
    noticed_s = (first.hang.at_ns - first.hang.since_ns) / 1e9
    found.hangs.append(Hung(rank=first.rank, cycle=first.cycle, noticed_s=noticed_s, would_s=rule.timeout_s))


def _between_saves(timeline: Timeline, tracks: Sequence[Track]) -> Iterator[tuple[int, int]]:
    """Yield the spans between moments at which timeouts are learned."""
    ends: Int64s = np.empty(0, dtype=np.int64)
    for track in sorted(tracks, key=lambda track: track.rank):
        if track.spans is not None and CHECKPOINTING in timeline.names:
            ends, _ = ended(timeline, track, CHECKPOINTING)
            break
    at = [-1, *sorted({int(end) for end in ends}), 1 << 62]
    yield from itertools.pairwise(at)


def sections_of(timelines: Sequence[Timeline]) -> list[str]:
    """Return all observed sections, and OUT_OF_SECTION."""
    names = dict.fromkeys(name for timeline in timelines for name in timeline.names)
    return [*(name for name in names if name not in (OUT_OF_SECTION, HEARTBEATS)), OUT_OF_SECTION]
