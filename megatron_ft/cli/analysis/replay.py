"""Replay of past runs with other timeouts: wrongly terminated ranks, and the delay in hangs. Pure.

A learned timeout is learned again here, from the minutes of the logs, at the end of those in which the run saved (at
the end of each cycle, if it never did). The logs continue after a rank that would have been ended, unlike the job. Of
the intervals above a timeout in one minute, the longest is known to 0.1 ms, the others to 9 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_ft.cli.analysis.intervals import HEARTBEATS, OUT_OF_SECTION, judged, longest_of_rest, of_section
from megatron_ft.cli.analysis.timeline import Timeline, Track, TrackMinute
from megatron_ft.core.board.intervals import CHECKPOINTING, STEP
from megatron_ft.core.timeouts.budget_rule import after_update, begin_cycle, learn
from megatron_ft.core.timeouts.known import Known
from megatron_ft.core.timeouts.minutes import SectionMinute
from megatron_ft.core.timeouts.sketch import Sketch, add_up, merge
from megatron_ft.core.timeouts.tail import length_of

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

    def learn(self, of_ranks: Sequence[Sketch]) -> None:
        """Learn from all intervals of this cycle so far, one sketch for each rank."""


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

    def learn(self, of_ranks: Sequence[Sketch]) -> None:
        sketch = merge(of_ranks)
        self._known = after_update(self._known, sketch, factor=self._factor)
        found = learn(self._known, sketch, factor=self._factor, rule=self._name, cap_s=None, previous_s=self.timeout_s)
        if found is not None:
            self.timeout_s, self.first_s = found.timeout_s, found.first_s


@dataclass(frozen=True, kw_only=True)
class WouldEnd:
    """A healthy interval above its timeout. Seconds; ``end_ns`` is the end of its minute, wall time."""

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
    of_ranks = [(track, list(of_section(track, name))) for track in tracks]
    hang = min((t.hang for t in tracks if t.hang is not None), key=lambda hang: hang.at_ns, default=None)
    worst: WouldEnd | None = None
    learned_from: list[Sketch] = [Sketch()] * len(of_ranks)
    for from_ns, to_ns in _between_saves(tracks):
        is_new = False
        if hang is not None and from_ns <= hang.at_ns < to_ns:
            _note_hang(tracks, name, rule, found)
        for index, (track, minutes) in enumerate(of_ranks):
            here = [(minute, section) for minute, section in minutes if from_ns < minute.to_ns <= to_ns]
            is_new = is_new or bool(here)
            for minute, section in here:
                this = _judge(track, minute, section, rule, found)
                worst = this if worst is None or (this is not None and this.took_s > worst.took_s) else worst
            learned_from[index] = add_up([learned_from[index], *(section.sketch for _, section in here)])
        seen = max((each.ended for each in learned_from), default=0)
        if (name != STEP or seen >= _LEAST) and is_new:
            rule.learn(learned_from)
    if worst is not None:
        found.would_end.append(worst)


def _judge(
    track: Track, minute: TrackMinute, section: SectionMinute, rule: ReplayedRule, found: Replayed
) -> WouldEnd | None:
    """Count these intervals. Return the longest if it is above its limit."""
    sketch = section.sketch
    if rule.timeout_s is None or rule.first_s is None:
        found.unjudged += sketch.ended
        return None
    found.judged += sketch.ended
    rest_s = longest_of_rest(section)
    above = []
    if sketch.first_s > rule.first_s:
        above.append((sketch.first_s, rule.first_s))
        found.too_long += 1
    if rest_s > rule.timeout_s:
        above.append((rest_s, rule.timeout_s))
        surely = sum(count for bucket, count in sketch.tail if length_of(bucket - 1) >= rule.timeout_s)
        found.too_long += max(1, round(surely))
    if not above:
        return None
    took_s, limit_s = max(above)
    return WouldEnd(rank=track.rank, cycle=track.cycle, end_ns=minute.to_ns, took_s=took_s, timeout_s=limit_s)


def _note_hang(tracks: Sequence[Track], name: str, rule: ReplayedRule, found: Replayed) -> None:
    """Note the first verdict of the cycle, if it was about this section."""
    first = min((t for t in tracks if t.hang is not None), key=lambda t: t.hang.at_ns if t.hang else 0)
    if judged(first) != name or first.hang is None:
        return
    noticed_s = (first.hang.at_ns - first.hang.since_ns) / 1e9
    found.hangs.append(Hung(rank=first.rank, cycle=first.cycle, noticed_s=noticed_s, would_s=rule.timeout_s))


def _between_saves(tracks: Sequence[Track]) -> Iterator[tuple[int, int]]:
    """Yield the spans between moments at which timeouts are learned."""
    ends: list[int] = []
    for track in sorted(tracks, key=lambda track: track.rank):
        ends = [minute.to_ns for minute, _ in of_section(track, CHECKPOINTING)]
        if ends:
            break
    yield from itertools.pairwise([-1, *sorted(set(ends)), 1 << 62])


def sections_of(timelines: Sequence[Timeline]) -> list[str]:
    """Return all observed sections, and OUT_OF_SECTION."""
    names = dict.fromkeys(name for timeline in timelines for name in timeline.names)
    return [*(name for name in names if name not in (OUT_OF_SECTION, HEARTBEATS)), OUT_OF_SECTION]
