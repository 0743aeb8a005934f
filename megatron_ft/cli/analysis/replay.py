"""Which ranks other timeouts would have terminated wrongly in runs that are over, and how late in a hang. Pure.

A learned timeout is learned again here, from the intervals of the logs, at the moments at which the run saved (at the
end of each cycle, if it never did). The logs go on behind a rank that would have been ended, as the job wouldn't have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ft.cli.analysis.intervals import HEARTBEATS, OUT_OF_SECTION, ended, judged
from megatron_ft.cli.analysis.timeline import Timeline, Track
from megatron_ft.cli.logs.progress import Int64s
from megatron_ft.core.timeouts.budget_rule import FIRST_INTERVALS, Known, after_update, estimate
from megatron_ft.core.timeouts.reference_rule import calculate_timeout
from megatron_ft.core.timeouts.tail import Tail

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
SAVE = "checkpointing"
_LEAST = 16
"""Intervals of a rank, before anything is learned from them."""


class Rule:
    """What the timeout of one section is. Times are seconds; None is no timeout.

    This one is a fixed timeout, which the user has chosen.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.first_s = timeout_s
        """Of the first intervals of a cycle."""

    def begin_cycle(self) -> None:
        """The processes are new."""

    def learn(self, took_s: Sequence[Sequence[float]], first_s: float) -> None:
        """What each rank has seen since the last time, but for the first ones of the cycle; the longest of those."""


class _LearnedRule(Rule):
    """Knows the longest interval of this cycle."""

    def __init__(self, factor: float, floor_s: float) -> None:
        super().__init__(None)
        self._factor, self._floor_s = factor, floor_s
        self._longest_s = 0.0

    def begin_cycle(self) -> None:
        self._longest_s = 0.0

    def learn(self, took_s: Sequence[Sequence[float]], first_s: float) -> None:
        self._longest_s = max(self._longest_s, first_s, *(max(of_rank, default=0.0) for of_rank in took_s))


class ReferenceRule(_LearnedRule):
    """The longest interval of this cycle times a factor; the mean of that and the timeout before."""

    def learn(self, took_s: Sequence[Sequence[float]], first_s: float) -> None:
        """See ``Rule``."""
        super().learn(took_s, first_s)
        self.timeout_s = self.first_s = calculate_timeout(
            longest=self._longest_s,
            safety_factor=self._factor,
            current=self.timeout_s,
            current_was_calculated=self.timeout_s is not None,
            floor=self._floor_s,
        )


class BudgetRule(_LearnedRule):
    """The tail of all intervals of the run."""

    def __init__(self, budget: float, factor: float, floor_s: float) -> None:
        super().__init__(factor, floor_s)
        self._budget = budget
        self._known = Known()

    def learn(self, took_s: Sequence[Sequence[float]], first_s: float) -> None:
        """See ``Rule``."""
        super().learn(took_s, first_s)
        before = self._known.tail
        tails = [Tail(dict(before.counts)) for _ in took_s]
        for tail, of_rank in zip(tails, took_s, strict=True):
            tail.add(of_rank)
        tail = Tail.joined(tails) if tails else before
        self._known = after_update(
            self._known,
            tail=tail,
            passed=max((len(of_rank) for of_rank in took_s), default=0),
            longest_s=self._longest_s,
            first_s=first_s,
            factor=self._factor,
        )
        found = estimate(self._known, budget=self._budget, factor=self._factor)
        assert found is not None
        self.timeout_s = max(found.timeout_s, self._floor_s)
        self.first_s = max(found.first_s, self.timeout_s)


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
    """A hang of the logs.

    Args:
        noticed_s: how long it took until it was noticed.
        would_s: how long it would have taken; None: it would never have been noticed.
    """

    rank: int
    cycle: int
    noticed_s: float
    would_s: float | None


@dataclass(kw_only=True)
class Replayed:
    """One section under one rule."""

    name: str
    judged: int = 0
    """Intervals that had a timeout."""
    unjudged: int = 0
    would_end: list[WouldEnd] = field(default_factory=list)
    """The longest of each cycle: a rank is terminated once in it."""
    too_long: int = 0
    """Intervals above their timeout, of all ranks."""
    hangs: list[Hung] = field(default_factory=list)
    last_s: float | None = None
    """The timeout at the end, the greater of it and that of first intervals."""


def replay(timelines: Sequence[Timeline], name: str, rule: Rule) -> Replayed:
    """One section; OUT_OF_SECTION is the time in none."""
    found = Replayed(name=name)
    for timeline in timelines:
        for cycle in sorted(timeline.tracks_by_cycle):
            tracks = timeline.tracks_by_cycle[cycle]
            rule.begin_cycle()
            _play_cycle(timeline, tracks, name, rule, found)
    if rule.timeout_s is not None:
        found.last_s = max(rule.timeout_s, rule.first_s or 0.0)
    return found


def _play_cycle(timeline: Timeline, tracks: Sequence[Track], name: str, rule: Rule, found: Replayed) -> None:
    of_ranks = [(track, *ended(timeline, track, name)) for track in tracks if track.spans is not None]
    hang = min((t.hang for t in tracks if t.hang is not None), key=lambda hang: hang.at_ns, default=None)
    worst: WouldEnd | None = None
    seen = 0
    for from_ns, to_ns in _between_saves(timeline, tracks):
        took: list[list[float]] = []
        first_s = 0.0
        if hang is not None and from_ns <= hang.at_ns < to_ns:
            _note_hang(tracks, name, rule, found)
        for track, end_ns, took_ns in of_ranks:
            begin, end = (int(at) for at in np.searchsorted(end_ns, (from_ns, to_ns), side="right"))
            middle = min(max(begin, FIRST_INTERVALS), end)
            took_s = took_ns / 1e9
            took.append(took_s[middle:end].tolist())
            first_s = max(first_s, float(took_s[begin:middle].max(initial=0.0)))
            for part, limit in ((slice(begin, middle), rule.first_s), (slice(middle, end), rule.timeout_s)):
                this = _judge(track, end_ns[part], took_s[part], limit, found)
                worst = this if worst is None or (this is not None and this.took_s > worst.took_s) else worst
            seen = max(seen, end)
        if (name != "step" or seen >= _LEAST) and (first_s or any(took)):
            rule.learn(took, first_s)
    if worst is not None:
        found.would_end.append(worst)


def _judge(track: Track, end_ns: Int64s, took_s: Floats, limit_s: float | None, found: Replayed) -> WouldEnd | None:
    """Count these intervals; return the longest if it is above the limit."""
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


def _note_hang(tracks: Sequence[Track], name: str, rule: Rule, found: Replayed) -> None:
    """The first verdict of the cycle, if it was about this section."""
    first = min((t for t in tracks if t.hang is not None), key=lambda t: t.hang.at_ns if t.hang else 0)
    if judged(first) != name or first.hang is None:
        return
    noticed_s = (first.hang.at_ns - first.hang.since_ns) / 1e9
    found.hangs.append(Hung(rank=first.rank, cycle=first.cycle, noticed_s=noticed_s, would_s=rule.timeout_s))


def _between_saves(timeline: Timeline, tracks: Sequence[Track]) -> Iterator[tuple[int, int]]:
    """From one moment at which timeouts are learned to the next."""
    ends: Int64s = np.empty(0, dtype=np.int64)
    for track in sorted(tracks, key=lambda track: track.rank):
        if track.spans is not None and SAVE in timeline.names:
            ends, _ = ended(timeline, track, SAVE)
            break
    at = [-1, *sorted({int(end) for end in ends}), 1 << 62]
    yield from itertools.pairwise(at)


def sections_of(timelines: Sequence[Timeline]) -> list[str]:
    """All that were seen, and OUT_OF_SECTION."""
    names = dict.fromkeys(name for timeline in timelines for name in timeline.names)
    return [*(name for name in names if name not in (OUT_OF_SECTION, HEARTBEATS)), OUT_OF_SECTION]
