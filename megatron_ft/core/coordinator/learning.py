"""Surveys of the intervals of all ranks in one cycle, and the timeouts learned from them. Pure.

A launcher reports a `Milestone`; the first report of each starts a `Survey` of all seated nodes. That of the end starts
when all nodes have reported it: what some ranks do after the others' end counts, too. The answers are merged as they
come. When all have come, or after ``SURVEY_S``, the rule is applied once, and all launchers get the `Learned`.
Nothing is kept from one survey to the next: what the rule goes on from comes from the launcher at place 0 each time, so
another coordinator can take over at any moment. Times are seconds of the coordinator's own clock.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from megatron_ft.core.board.intervals import CHECKPOINTING, SECTIONS, WARMUP
from megatron_ft.core.errors import near
from megatron_ft.core.job.edge import Send
from megatron_ft.core.timeouts import budget_rule
from megatron_ft.core.timeouts.exchange import (
    Facts,
    Intervals,
    Learned,
    LearnedTimeout,
    Milestone,
    Moment,
    Raised,
    Survey,
    any_of,
    enforces,
)
from megatron_ft.core.timeouts.in_force import OUT_OF_SECTION
from megatron_ft.core.timeouts.known import Known
from megatron_ft.core.timeouts.learned import choose_update
from megatron_ft.core.timeouts.sketch import MOST_NAMES, Sketch, is_name, merge
from megatron_ft.core.times import earliest

SURVEY_S = 2.0
"""Answers that take longer are left out."""
BETWEEN_S = 1.0
"""Least time from the end of a survey to the start of the next one, unless the run ends."""
UNOPENED_STEPS = 10
"""After this many steps a section that no rank has opened is probably misspelt."""
_OPENED_LATE = (CHECKPOINTING, WARMUP)
"""A save may be an hour away, and "warmup" is never opened."""
_MOST_UNOPENED = 16
_PLACE_THAT_KNOWS = 0
_NO_HOOKS = (
    "no timeouts are learned from a script that calls RankMonitorClient itself: it does that with "
    "calculate_and_set_section_timeouts() or calculate_and_set_hb_timeouts()"
)


@dataclass
class SurveyLog:
    """Part of the learning that outlives a cycle: one per coordinator."""

    number: int = 0
    """Number of the last survey."""
    has_named_unopened: bool = False


@dataclass
class CycleLearning:
    """Surveys of one cycle. ``take`` is to be called after each message, and when ``alarm_s`` is over."""

    cycle: int
    log: SurveyLog
    alarm_s: float | None = None
    _survey: _OpenSurvey | None = None
    _beyond: dict[Moment, int] = field(default_factory=dict)
    """By kind, the milestone that was reached last."""
    _next: Moment | None = None
    """Kind of the milestone whose survey is to start."""
    _not_before_s: float = 0.0
    _enforces: bool | None = None
    """Ranks may be terminated by what is learned; None: not known yet."""
    _raised: dict[str, None] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    """Places of the nodes whose runs are over."""
    _in_run: set[int] | None = None
    """Places of those that were healthy at the first end of a run, and whose own isn't over; None: before."""

    def reached(self, place: int, milestone: Milestone) -> bool:
        """Take a milestone of the node at that place; returns True if it is beyond all earlier ones of its kind."""
        moment = milestone.moment
        if milestone.cycle == self.cycle and moment is Moment.END:
            is_new = place not in self._ended
            self._ended.add(place)
            if self._in_run is not None:
                self._in_run.discard(place)
            return is_new
        if milestone.cycle != self.cycle or milestone.count <= self._beyond.get(moment, -1):
            return False
        self._beyond[moment] = milestone.count
        names_unopened = not self.log.has_named_unopened and milestone.count >= UNOPENED_STEPS
        if moment is Moment.STEPS and not names_unopened and (self._enforces or milestone.count <= UNOPENED_STEPS):
            return False  # where timeouts are enforced, they are learned at saves and at the end
        if self._next is not Moment.END:
            self._next = moment
        return True

    def _ends(self, healthy: Callable[[], Iterable[int]]) -> None:
        """Have the survey of the end begin, once, when the runs of all nodes are over."""
        if self._in_run is None:
            self._in_run = {*healthy()} - self._ended
        if not self._in_run and Moment.END not in self._beyond:
            self._beyond[Moment.END] = 0
            self._next = Moment.END

    def answered(self, place: int, intervals: Intervals) -> None:
        """Take the answer of the node at that place; one that was not asked for is ignored."""
        if self._survey is not None and intervals.cycle == self.cycle:
            self._survey.answered(place, intervals)

    def lost(self, place: int) -> None:
        """The node at that place won't answer."""
        if self._survey is not None:
            self._survey.awaited.discard(place)

    def raised(self, raised: Raised) -> bool:
        """Take a kill by a learned timeout; returns True if the other launchers don't know of it."""
        is_sound = raised.cycle == self.cycle and is_name(raised.name) and len(self._raised) < MOST_NAMES
        if not is_sound or raised.name in self._raised:
            return False
        self._raised[raised.name] = None
        return True

    @property
    def all_raised(self) -> list[Raised]:
        """The kills by learned timeouts in this cycle, for a launcher that may not know of them."""
        return [Raised(self.cycle, name) for name in self._raised]

    def take(
        self, now_s: float, links: Callable[[], Mapping[int, int]], healthy: Callable[[], Iterable[int]]
    ) -> list[Send]:
        """Return the messages that are due.

        Args:
            now_s: the time.
            links: connections of the seated nodes, by place.
            healthy: places of the nodes whose ranks run.
        """
        sends, self.alarm_s = [], None
        if self._ended:
            self._ends(healthy)
        survey = self._survey
        if survey is not None and (not survey.awaited or now_s >= survey.until_s):
            self._survey, self._not_before_s = None, now_s + BETWEEN_S
            sends += _to_all(links(), self._learn(survey))
        moment = self._next
        if self._survey is None and moment is not None:
            if moment is Moment.END or now_s >= self._not_before_s:
                sends += self._begin(moment, links(), now_s)
            else:
                self.alarm_s = self._not_before_s
        if self._survey is not None:
            self.alarm_s = earliest(self.alarm_s, self._survey.until_s)
        return sends

    def _begin(self, moment: Moment, links: Mapping[int, int], now_s: float) -> list[Send]:
        self._next = None
        self.log.number += 1
        survey = Survey(self.cycle, self.log.number, moment)
        self._survey = _OpenSurvey(survey, now_s + SURVEY_S, set(links))
        return _to_all(links, survey)

    def _learn(self, survey: _OpenSurvey) -> Learned:
        asked, first = survey.survey, survey.first
        learned = Learned(self.cycle, asked.number, asked.moment)
        if first is None or first.known is None:
            return learned
        self._enforces = enforces(survey.facts, first.mode)
        sketches = {name: each.sketch for name, each in survey.merged.items()}
        unopened = self._unopened(asked.moment, first.configured, sketches)
        learned = replace(learned, enforces=self._enforces, unopened=unopened)
        return apply_rule(learned, sketches, survey.facts, first)

    def _unopened(self, moment: Moment, configured: Iterable[str], sketches: Mapping[str, Sketch]) -> dict[str, str]:
        is_due = moment is Moment.END or self._beyond.get(Moment.STEPS, 0) >= UNOPENED_STEPS
        if self.log.has_named_unopened or not is_due:
            return {}
        self.log.has_named_unopened = True
        return find_unopened(configured, opened=[name for name, sketch in sketches.items() if _is_opened(sketch)])


@dataclass
class _OpenSurvey:
    """A survey whose answers are awaited from the nodes at these places."""

    survey: Survey
    until_s: float
    awaited: set[int]
    merged: dict[str, _Merged] = field(default_factory=dict)
    facts: Facts = Facts()  # noqa: RUF009 - frozen
    first: Intervals | None = None
    """Answer of the node at place 0."""

    def answered(self, place: int, intervals: Intervals) -> None:
        if intervals.number != self.survey.number or place not in self.awaited:
            return
        self.awaited.discard(place)
        self.facts = any_of(self.facts, intervals.facts)
        for name, sketch in intervals.sketches.items():
            merged = self.merged.get(name)
            if merged is not None:
                merged.add(sketch)
            elif len(self.merged) < MOST_NAMES:
                self.merged[name] = _Merged(sketch)
        if place == _PLACE_THAT_KNOWS and _is_bounded(intervals):
            self.first = intervals


class _Merged:
    """Sketch of all ranks so far. Most of 10,000 add nothing to it, and cost little."""

    __slots__ = ("_above", "_buckets", "sketch")

    def __init__(self, sketch: Sketch) -> None:
        self._set(sketch)

    def add(self, sketch: Sketch) -> None:
        """Merge the intervals of more ranks."""
        if not self._covers(sketch):
            self._set(merge((self.sketch, sketch)))

    def _set(self, sketch: Sketch) -> None:
        self.sketch = sketch
        self._buckets = [bucket for bucket, _ in sketch.tail]
        counts = [count for _, count in reversed(sketch.tail)]
        self._above = [*reversed([*itertools.accumulate(counts)]), 0.0]
        """By bucket, how many intervals were at least that long."""

    def _covers(self, other: Sketch) -> bool:
        own = self.sketch
        if (
            other.ended > own.ended
            or (other.longest_s, -other.rank) > (own.longest_s, -own.rank)
            or other.first_s > own.first_s
            or other.explained_s > own.explained_s
            or other.open_s > own.open_s
        ):
            return False
        longer = 0.0
        for bucket, count in reversed(other.tail):
            longer += count
            if longer > self._above[bisect.bisect_left(self._buckets, bucket)]:
                return False
        return True


def find_unopened(configured: Iterable[str], *, opened: Iterable[str]) -> dict[str, str]:
    """Return the sections that no rank has opened, each with the one that was probably meant, or ""."""
    known = {*opened}
    missing = sorted({*configured} - known - {*_OPENED_LATE, OUT_OF_SECTION})[:_MOST_UNOPENED]
    return {name: near(name, sorted({*known, *SECTIONS} - {name})) or "" for name in missing}


def apply_rule(learned: Learned, sketches: Mapping[str, Sketch], facts: Facts, first: Intervals) -> Learned:
    """Add the timeouts that may be learned now; ``first``: the answer of the node at place 0."""
    if learned.enforces and learned.moment is Moment.STEPS:
        return learned if facts.has_hooks else replace(learned, reasons=(_NO_HOOKS,))
    update = choose_update(
        is_persistent_chkpt_loaded=facts.loaded,
        is_setup_open=facts.setup_open,
        has_seen_enough_steps=facts.enough_steps,
        has_saved=facts.saved,
        is_async_save=facts.async_saves,
        is_closing=learned.moment is Moment.END,
    )
    timeouts: dict[str, LearnedTimeout] = {}
    known = {}
    for name in (*update.sections, *([OUT_OF_SECTION] if update.out_of_section else [])):
        sketch = sketches.get(name)
        if sketch is None or not _is_opened(sketch) or (name in first.caps and not learned.enforces):
            continue
        now = budget_rule.after_update((first.known or {}).get(name) or Known(), sketch, factor=first.factor)
        found = budget_rule.learn(
            now,
            sketch,
            factor=first.factor,
            rule=first.rule,
            cap_s=first.caps.get(name),
            previous_s=first.previous.get(name),
        )
        if found is not None:
            timeouts[name], known[name] = found, now
    writes = learned.enforces and bool(timeouts)
    reasons = update.reasons if learned.enforces else ()
    return replace(learned, timeouts=timeouts, known=known, writes=writes, reasons=reasons)


def _is_opened(sketch: Sketch) -> bool:
    return sketch.ended > 0 or sketch.open_s >= 0.0


def _is_bounded(intervals: Intervals) -> bool:
    """Return False for an answer that would make the coordinator's work or messages grow."""
    tables = (intervals.known or {}, intervals.caps, intervals.previous, intervals.configured)
    return all(len(table) <= MOST_NAMES and all(map(is_name, table)) for table in tables)


def _to_all(links: Mapping[int, int], message: Survey | Learned) -> list[Send]:
    return [Send(list(links.values()), message)] if links else []
