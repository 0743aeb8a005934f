"""Suggested timeouts, from the intervals that event logs hold. Pure; seconds."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence

from megatron_ft.cli.analysis.interval_lengths import HEARTBEATS, OUT_OF_SECTION, of_section
from megatron_ft.cli.analysis.timeline import Timeline
from megatron_ft.core.config.config import ConfigValues
from megatron_ft.core.wording import counted

LEAST_INTERVALS = 100
"""Fewest intervals of one rank from which a timeout is suggested: each start of a job has only one "setup"."""
_FLOOR_S = 60.0
_FACTOR = ConfigValues().safety_factor
RULE = f"{_FACTOR:g} x the longest interval of any rank, at least {_FLOOR_S:g} s"


def suggested_s(longest_s: float) -> float:
    """Return the timeout for intervals of at most this length, rounded up to two figures."""
    timeout_s = max(_FACTOR * longest_s, _FLOOR_S)
    digit = 10.0 ** (math.floor(math.log10(timeout_s)) - 1)
    return round(math.ceil(round(timeout_s / digit, 6)) * digit, 9)


def suggestion(timelines: Sequence[Timeline]) -> tuple[list[str], bool]:
    """Return lines for a YAML file, and True if they hold a timeout.

    What too few intervals were observed of is a comment: a section without a timeout ends no rank, one with a timeout
    that is too short ends healthy ones.
    """
    names = dict.fromkeys(name for timeline in timelines for name in timeline.names)
    sections = [name for name in names if name not in (OUT_OF_SECTION, HEARTBEATS)]
    good: list[str] = []
    comments: list[str] = []
    of_sections = 0
    for name in [*sections, OUT_OF_SECTION]:
        count, longest_s = _observed(timelines, name)
        # JSON's quotes are YAML's, too: a name from a log may hold anything
        key = name if name.isidentifier() else json.dumps(name)
        key = "rank_out_of_section_timeout" if name == OUT_OF_SECTION else key
        if count < LEAST_INTERVALS:
            number = counted(count, "interval")
            comments.append(f"# {key}: no value: {number} observed on the rank with most, {LEAST_INTERVALS} are needed")
            continue
        indent = "  " if name == OUT_OF_SECTION else "    "
        of_sections += name != OUT_OF_SECTION
        good.append(
            f"{indent}{key}: {suggested_s(longest_s):g}  # {RULE}; the longest of {count} took {longest_s:.4g} s"
        )
    if not good:
        return comments, False
    return ["fault_tolerance:", *(["  rank_section_timeouts:"] if of_sections else []), *good, *comments], True


def _observed(timelines: Sequence[Timeline], name: str) -> tuple[int, float]:
    """Return the number of intervals of the rank that had most, and the longest one of all ranks."""
    counts: Counter[int] = Counter()
    longest_s = 0.0
    for timeline in timelines:
        for track in timeline.tracks:
            for _, section in of_section(track, name):
                counts[track.rank] += section.count
                longest_s = max(longest_s, section.longest_s, section.first_s)
    return max(counts.values(), default=0), longest_s
