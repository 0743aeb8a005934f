"""Timeouts in force beside the observed intervals: how long sections really took, and how much room is left. Pure.

A timeout is suggested from the same intervals.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.cli.logs.runs import Run
from megatron_ft.config.config import ConfigValues
from megatron_ft.link.base.intervals import HangKind
from megatron_ft.link.base.wording import counted
from megatron_ft.link.facts import minutes
from megatron_ft.link.facts.launcher import CauseKind
from megatron_ft.link.facts.minutes import SectionMinute, middle_of
from megatron_ft.link.facts.monitor import Minute, Timeouts

OUT_OF_SECTION = "(out of section)"
HEARTBEATS = "(between heartbeats)"
_LOGGED = {
    minutes.OUT_OF_SECTION: OUT_OF_SECTION,
    minutes.HEARTBEAT: HEARTBEATS,
    HangKind.INITIAL_HEARTBEAT.value: HEARTBEATS,
}
_LIMIT_S = 1e7  # anything longer isn't meant as a limit
_MIDDLES_S = [middle_of(bucket) for bucket in range(len(minutes.BOUNDS_S) + 1)]
LEAST_INTERVALS = 100
"""Fewest intervals of one rank from which a timeout is suggested: each start of a job has only one "setup"."""
_FLOOR_S = 60.0
_FACTOR = ConfigValues().safety_factor
RULE = f"{_FACTOR:g} x the longest interval of any rank, at least {_FLOOR_S:g} s"


@dataclass(kw_only=True)
class Interval:
    """One timeout and its observed intervals; times in seconds, None is unknown.

    Args:
        name: section, or OUT_OF_SECTION, or HEARTBEATS.
        timeout_s: in force at the end of the run; the smallest, if ranks differ; None: none, or not logged.
        longest_rank, longest_cycle: rank and cycle of the longest interval.
        left_out_s: for OUT_OF_SECTION, the longest of the first ones of each cycle, which aren't in ``longest_s``.
        hangs: cycles that ended by it, and hangs that were reported; such an interval isn't an observed one.
        by_rank: number of intervals of each rank.
        lengths: number of intervals by length; to 12 % where a minute had more than 6 intervals.
    """

    name: str
    timeout_s: float | None = None
    longest_s: float | None = None
    longest_rank: int | None = None
    longest_cycle: int | None = None
    left_out_s: float | None = None
    hangs: int = 0
    by_rank: Counter[int] = field(default_factory=Counter)
    lengths: Counter[float] = field(default_factory=Counter)

    def add(self, rank: int, cycle: int, section: SectionMinute) -> None:
        """Count the intervals of a minute of a rank."""
        self.by_rank[rank] += section.count
        for _, length_s in section.spans:
            self.lengths[length_s] += 1
        for bucket, count in section.counts.items() if not section.spans else ():
            self.lengths[_MIDDLES_S[bucket]] += count
        if section.longest_s > (-1.0 if self.longest_s is None else self.longest_s):
            self.longest_s, self.longest_rank, self.longest_cycle = section.longest_s, rank, cycle
        if self.name == OUT_OF_SECTION and section.first_s > 0:
            self.left_out_s = max(self.left_out_s or 0.0, section.first_s)

    @property
    def most(self) -> int:
        """Number of intervals of the rank with most."""
        return max(self.by_rank.values(), default=0)

    @property
    def count(self) -> int:
        return self.by_rank.total()

    @property
    def margin(self) -> float | None:
        """Timeout divided by the longest interval; below 1, a longer interval ended no rank."""
        return self.timeout_s / self.longest_s if self.timeout_s and self.longest_s else None

    @property
    def suggested_s(self) -> float | None:
        """Timeout suggested for it, rounded up to two figures; None if too few intervals were observed."""
        longest_s = max(self.longest_s or 0.0, self.left_out_s or 0.0)
        return suggested_s(longest_s) if self.most >= LEAST_INTERVALS else None

    def quantile(self, share: float) -> float | None:
        """Return the length that this share of the intervals doesn't exceed; None without any."""
        if self.longest_s is None:
            return None
        left = share * self.lengths.total()
        for length_s in sorted(self.lengths):
            left -= self.lengths[length_s]
            if left <= 0:
                return min(length_s, self.longest_s)
        return None


def observe(minute: Minute, found: dict[str, Interval]) -> None:
    """Add the intervals of a minute to those found, by name."""
    for of in minute.ranks:
        for logged, section in of.sections.items():
            name = _LOGGED.get(logged, logged)
            if name not in found:
                found[name] = Interval(name=name)
            if section.count:
                found[name].add(of.rank, minute.cycle, section)


def intervals_of(timeline: Timeline, found: Mapping[str, Interval]) -> list[Interval]:
    """Return a row for each section observed or with a timeout, then out of section and between heartbeats."""
    told = timeline.run.accounting
    timeouts = {_LOGGED.get(name, name): seconds for name, seconds in timeouts_in_force(timeline.run).items()}
    hangs = Counter(_LOGGED.get(hang.section, hang.section) for hang in told.hangs)
    causes = [each.cause for each in told.cycles if each.cause is not None and each.cause.kind is CauseKind.HANG]
    hangs.update(_LOGGED.get(cause.section, cause.section) for cause in causes)
    names, special = dict.fromkeys((*timeline.names, *timeouts, *found)), (OUT_OF_SECTION, HEARTBEATS)
    rows = []
    for name in sorted(names, key=lambda name: special.index(name) if name in special else -1):
        row = found.get(name) or Interval(name=name)
        row.timeout_s, row.hangs = timeouts.get(name), hangs[name]
        rows.append(row)
    return rows


def timeouts_in_force(run: Run) -> dict[str, float]:
    """Return seconds by logged name, from the last `timeouts` record of each rank; the smallest, if ranks differ.

    Only records of the last cycle that has any count: before, ranks may have had other timeouts.
    """
    told = [timed.record for timed in run.records if isinstance(timed.record, Timeouts)]
    last_cycle = max((record.cycle for record in told), default=None)
    last = {record.rank: record for record in told if record.cycle == last_cycle}
    found: dict[str, float] = {}
    for record in last.values():
        of = {**record.sections, minutes.OUT_OF_SECTION: record.out_of_section, minutes.HEARTBEAT: record.heartbeat}
        for name, seconds in of.items():
            if seconds and 0 < seconds < _LIMIT_S:
                found[name] = min(seconds, found.get(name, seconds))
    return found


def suggested_s(longest_s: float) -> float:
    """Return the timeout for intervals of at most this length, rounded up to two figures."""
    timeout_s = max(_FACTOR * longest_s, _FLOOR_S)
    digit = 10.0 ** (math.floor(math.log10(timeout_s)) - 1)
    return round(math.ceil(round(timeout_s / digit, 6)) * digit, 9)


def suggestion(found: Mapping[str, Interval]) -> tuple[list[str], bool]:
    """Return lines for a YAML file, and True if they hold a timeout.

    What too few intervals were observed of is a comment: a section without a timeout ends no rank, one with a timeout
    that is too short ends healthy ones.
    """
    lines: list[str] = []
    comments: list[str] = []
    for name in [*(name for name in found if name not in (HEARTBEATS, OUT_OF_SECTION)), OUT_OF_SECTION]:
        interval = found.get(name) or Interval(name=name)
        # JSON's quotes are YAML's, too: a name from a log may hold anything
        key = name if name.isidentifier() else json.dumps(name)
        key = "rank_out_of_section_timeout" if name == OUT_OF_SECTION else key
        if interval.suggested_s is None:
            number = counted(interval.most, "interval")
            comments.append(f"# {key}: no value: {number} observed on the rank with most, {LEAST_INTERVALS} are needed")
            continue
        longest_s = max(interval.longest_s or 0.0, interval.left_out_s or 0.0)
        if not lines:
            lines += ["fault_tolerance:", *([] if name == OUT_OF_SECTION else ["  rank_section_timeouts:"])]
        told = f"{RULE}; the longest of {interval.most} took {longest_s:.4g} s"
        lines.append(f"{'  ' if name == OUT_OF_SECTION else '    '}{key}: {interval.suggested_s:g}  # {told}")
    return [*lines, *comments], bool(lines)
