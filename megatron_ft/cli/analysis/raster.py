"""The timeline as a grid for the pictures: each rank's main state in each column of time. Pure.

A section with at most six intervals in a minute is drawn where they were. Of others only the sums are known: where such
a section took a tenth of the minute or more, the minute has the state of its longest one, "summed up", up to the end of
its last iteration.

A run may have millions of spans, and a picture some thousand columns: both pictures are drawn from the grid, so that
they cost the same for two ranks and for thousands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.cli.analysis.failures import found_culprits
from megatron_ft.cli.analysis.timeline import Timeline, Track
from megatron_ft.link.facts.minutes import MOST_SPANS

ABSENT, HUNG, WAITING, SILENT, OUTSIDE, FIRST_SECTION = range(6)
_SPECIAL = ("no process", "hung", "waits for the hung rank", "nothing recorded", "out of section")
MOST_SECTIONS = 120
"""Sections with states of their own, which are a byte: one for intervals, the next for sums; the others share two."""
SUMMED = "{} (summed up)"
_RARE, _SALIENT = 0.05, 0.1  # a section open for less than this share of a rank's life shows in a column from that on

_DEEPEST = 32

Int64s = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """States of ranks (rows) in columns of time.

    Args:
        states: ABSENT, HUNG (from the beginning of what the verdict is about), WAITING
        (the same of a rank that isn't the culprit of a finding), SILENT (nothing recorded), OUTSIDE, or
        FIRST_SECTION + twice the section's index (at most MOST_SECTIONS), plus one where only sums are known. The
        innermost section counts.
        edges_ns: edges of the columns, wall ns: one more than there are columns.
    """

    states: npt.NDArray[np.uint8]
    ranks: tuple[int, ...]
    edges_ns: Int64s


def state_names(names: Sequence[str]) -> list[str]:
    """Return the names of the numbers in ``Grid.states``."""
    shown = [*names[:MOST_SECTIONS], *(["other sections"] if len(names) > MOST_SECTIONS else [])]
    return [*_SPECIAL, *(text for name in shown for text in (name, SUMMED.format(name)))]


def edges_ns(begin_ns: int, end_ns: int, columns: int) -> Int64s:
    """Return the edges of ``columns`` equal columns."""
    return np.linspace(0, max(1, end_ns - begin_ns), columns + 1).astype(np.int64) + begin_ns


def rasterize(timeline: Timeline, edges: Int64s) -> Grid:
    """Return the grid of all ranks between these edges."""
    ranks = tuple(timeline.ranks)
    states = np.zeros((len(ranks), len(edges) - 1), dtype=np.uint8)
    rows = {rank: row for row, rank in enumerate(ranks)}
    numbers = {name: number for number, name in enumerate(timeline.names)}
    culprits = {cycle.cycle: found_culprits(timeline, cycle.cycle) for cycle in timeline.run.cycles}
    for track in timeline.tracks:
        if track.end_ns < edges[0] or track.begin_ns >= edges[-1]:
            continue
        # only the columns in which it lived: a run of a hundred cycles has a hundred tracks for each rank
        first = max(0, int(np.searchsorted(edges, track.begin_ns, side="right")) - 1)
        end = min(len(edges) - 1, max(first + 1, int(np.searchsorted(edges, track.end_ns, side="left"))))
        named = culprits.get(track.cycle)
        overdue = WAITING if named and track.rank not in named else HUNG
        mine = _states(track, numbers, edges[first : end + 1], overdue)
        row = states[rows[track.rank]][first:end]
        # where two cycles share a column, a hang wins, else the later one
        fresh = (mine != ABSENT) & (row != HUNG) & (row != WAITING)
        row[fresh] = mine[fresh]
    return Grid(states=states, ranks=ranks, edges_ns=edges)


def _states(track: Track, numbers: Mapping[str, int], edges: Int64s, overdue: int) -> npt.NDArray[np.uint8]:
    width = np.diff(edges)
    alive = _share([(track.begin_ns, track.end_ns)], edges, width)
    states = np.where(alive > 0.5, OUTSIDE, ABSENT).astype(np.uint8)
    if track.end_ns - track.begin_ns < width[0]:
        states[alive > 0] = OUTSIDE  # a short life must not vanish
    lived = states != ABSENT
    known = np.minimum(_share(_covered(track), edges, width), alive)
    levels, sums = _levels(track, numbers)
    for section, spans in sums.items():
        states[(_share(spans, edges, width) > 0.5 * alive) & lived] = _state(section, is_sum=True)
    for level in levels:
        _paint(states, level, edges, width, alive, max(1, track.end_ns - track.begin_ns))
    states[lived & (known < 0.5 * alive)] = SILENT
    if track.hung_since_ns is not None:
        states[_share([(track.hung_since_ns, track.end_ns)], edges, width) > 0] = overdue
    states[alive == 0] = ABSENT
    return states


def _covered(track: Track) -> list[tuple[int, int]]:
    """Return the times that minutes tell of; the first and the last stand for the rest of the rank's life, too."""
    corners = [at for minute in track.minutes for at in (minute.from_ns, minute.to_ns)]
    corners[:1], corners[-1:] = ([track.begin_ns], [track.end_ns]) if corners else ([], [])
    return list(zip(corners[::2], corners[1::2], strict=True))


_Level = dict[int, list[tuple[int, int]]]
"""Intervals of sections at one depth, by section."""


def _paint(
    states: npt.NDArray[np.uint8], level: _Level, edges: Int64s, width: Int64s, alive: Shares, length: int
) -> None:
    """Paint a level: sections that together fill half of a column take it.

    A rare section takes a column with less: otherwise a checkpoint shorter than two columns would show or not depending
    on where it lies.
    """
    shares = {section: _share(spans, edges, width) for section, spans in level.items()}
    each = np.stack(list(shares.values()))
    best = np.array(list(shares))[each.argmax(axis=0)]
    taken = (each.sum(axis=0) >= 0.5 * np.maximum(alive, 1e-12)) & (states != ABSENT) & (each.max(axis=0) > 0)
    states[taken] = _state(best[taken])
    for section, share in shares.items():
        if sum(end - begin for begin, end in level[section]) < _RARE * length:
            states[(share >= _SALIENT) & (states != ABSENT)] = _state(section)


def _state(section: npt.ArrayLike, *, is_sum: bool = False) -> npt.NDArray[np.uint8]:
    numbers = np.minimum(np.asarray(section, dtype=np.int64), MOST_SECTIONS)
    return (2 * numbers + FIRST_SECTION + is_sum).astype(np.uint8)


def _levels(track: Track, numbers: Mapping[str, int]) -> tuple[list[_Level], _Level]:
    """Return intervals by depth and section, outermost first; and the minutes of which only sums are known."""
    found: dict[int, _Level] = {}
    sums: _Level = {}
    for index, minute in enumerate(track.minutes):
        begins_s, ends_s = minute.of.from_s, minute.of.to_s
        if minute.of.iterations:  # before the first iteration a rank starts; after the last one it hangs, or saves
            (first, first_s), (last, last_s) = minute.of.iterations[0], minute.of.iterations[-1]
            step_s = (last_s - first_s) / max(1, last - first)
            begins_s, ends_s = first_s if index == 0 else begins_s, min(ends_s, last_s + step_s)
        longest: tuple[float, int] | None = None
        for name, of in minute.of.sections.items():
            if name not in numbers:
                continue
            mine = found.setdefault(min(of.depth, _DEEPEST), {}).setdefault(numbers[name], [])
            zero_ns = minute.zero_ns  # a run may have millions of them
            mine += [(zero_ns + int(at_s * 1e9), zero_ns + int((at_s + long_s) * 1e9)) for at_s, long_s in of.spans]
            if of.count > MOST_SPANS:
                longest = max(longest or (0.0, 0), (of.total_s, numbers[name]))
        if longest is not None and longest[0] >= _SALIENT * (ends_s - begins_s):
            sums.setdefault(longest[1], []).append((minute.wall_ns(begins_s), minute.wall_ns(ends_s)))
    for name, depth, begun_ns in track.still_open():
        found.setdefault(min(depth, _DEEPEST), {}).setdefault(numbers[name], []).append((begun_ns, track.end_ns))
    levels = [{name: spans for name, spans in found[depth].items() if spans} for depth in sorted(found)]
    return [level for level in levels if level], sums


def _share(spans: Sequence[tuple[int, int]], edges: Int64s, width: Int64s) -> Shares:
    """Return the share of each column that these spans cover; they are in order."""
    if not spans:
        return np.zeros(len(width))
    origin = int(edges[0])  # small numbers: a float can't hold ns since the epoch
    corners = np.maximum.accumulate(np.array(spans, dtype=np.int64).ravel() - origin)
    lengths = np.diff(corners, prepend=corners[0])
    lengths[::2] = 0
    shares: Shares = np.diff(np.interp(edges - origin, corners, np.cumsum(lengths))) / width
    return shares
