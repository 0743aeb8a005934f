"""The timeline as a grid for the picture: each rank's main state in each column of time. Pure.

A section with at most six intervals in a minute is drawn where they were. Of others only the sums are known: where such
a section took a tenth of the minute or more, the minute has the state of its longest one, "summed up", up to the end of
its last iteration.

A run may have millions of spans, and a picture some thousand columns: the picture is drawn from the grid, so that
it costs the same for two ranks and for thousands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megatron_ft.cli.analysis.failures import found_culprits
from megatron_ft.cli.analysis.timeline import (
    FIRST,
    FIRST_NS,
    FROM,
    LAST,
    LAST_NS,
    SUMMED,
    SUMMED_NS,
    TO,
    Int64s,
    Timeline,
    Track,
)

ABSENT, HUNG, WAITING, SILENT, OUTSIDE, FIRST_SECTION = range(6)
_SPECIAL = ("no process", "hung", "waits for the hung rank", "nothing recorded", "out of section")
MOST_SECTIONS = 120
"""Sections with states of their own, which are a byte: one for intervals, the next for sums; the others share two."""
FAULT_COLOR = "#c1121f"
_SPECIAL_COLORS = ("#ffffff", FAULT_COLOR, "#f0a994", "#bfbfbf", "#ececec")
# Tableau's colours without the red and the grey, which have a meaning here; the first sections get the calmest
_COLORS = (
    *("#4e79a7", "#f2b134", "#59a14f", "#b07aa1", "#76b7b2", "#9c755f", "#edc948", "#a0cbe8", "#8cd17d", "#d4a6c8"),
    *("#6b4c9a", "#2f6f6f", "#c49c94", "#86bcb6"),
)
_OTHERS = "#444444"
_RARE, _SALIENT = 0.05, 0.1  # a section open for less than this share of a rank's life shows in a column from that on

Shares = npt.NDArray[np.float64]


States = npt.NDArray[np.uint8]
"""States of ranks (rows) in columns of time: ABSENT, HUNG (from the beginning of what the verdict is about), WAITING
(the same of a rank that isn't the culprit of a finding), SILENT (nothing recorded), OUTSIDE, or FIRST_SECTION + twice
the section's index (at most MOST_SECTIONS), plus one where only sums are known. The innermost section counts."""


def states_of(sections: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and colour of each number in `States`; what is only summed up is paler."""
    shown = [(name, _COLORS[at % len(_COLORS)]) for at, name in enumerate(sections[:MOST_SECTIONS])]
    shown += [("other sections", _OTHERS)] if len(sections) > MOST_SECTIONS else []
    both = (each for name, color in shown for each in ((name, color), (f"{name} (summed up)", f"{color}99")))
    return [*zip(_SPECIAL, _SPECIAL_COLORS, strict=True), *both]


def edges_ns(begin_ns: int, end_ns: int, columns: int) -> Int64s:
    """Return the edges of ``columns`` equal columns."""
    return np.linspace(0, max(1, end_ns - begin_ns), columns + 1).astype(np.int64) + begin_ns


def rasterize(timeline: Timeline, edges: Int64s) -> States:
    """Return the grid of all ranks between these edges of its columns, wall ns."""
    states = np.zeros((len(timeline.ranks), len(edges) - 1), dtype=np.uint8)
    rows = {rank: row for row, rank in enumerate(timeline.ranks)}
    culprits = {cycle.cycle: found_culprits(timeline, cycle.cycle) for cycle in timeline.run.cycles}
    for track in timeline.tracks:
        if track.end_ns < edges[0] or track.begin_ns >= edges[-1]:
            continue
        # only the columns in which it lived: a run of a hundred cycles has a hundred tracks for each rank
        first = max(0, int(np.searchsorted(edges, track.begin_ns, side="right")) - 1)
        end = min(len(edges) - 1, max(first + 1, int(np.searchsorted(edges, track.end_ns, side="left"))))
        named = culprits.get(track.cycle)
        overdue = WAITING if named and track.rank not in named else HUNG
        mine = _states(track, edges[first : end + 1], overdue)
        row = states[rows[track.rank]][first:end]
        # where two cycles share a column, a hang wins, else the later one
        fresh = (mine != ABSENT) & (row != HUNG) & (row != WAITING)
        row[fresh] = mine[fresh]
    return states


def _states(track: Track, edges: Int64s, overdue: int) -> States:
    width = np.diff(edges)
    alive = _share([track.begin_ns, track.end_ns], edges, width)
    states = np.where(alive > 0.5, OUTSIDE, ABSENT).astype(np.uint8)
    if track.end_ns - track.begin_ns < width[0]:
        states[alive > 0] = OUTSIDE  # a short life must not vanish
    lived = states != ABSENT
    for section, spans in _sums(track):
        states[(_share(spans, edges, width) > 0.5 * alive) & lived] = _state(section, is_sum=True)
    for level in _levels(track):
        _paint(states, level, edges, width, alive, max(1, track.end_ns - track.begin_ns))
    # minutes tell of their time; the first and the last stand for the rest of the rank's life, too
    corners = track.minutes[:, (FROM, TO)].ravel()
    corners[:1], corners[-1:] = track.begin_ns, track.end_ns
    states[lived & (np.minimum(_share(corners, edges, width), alive) < 0.5 * alive)] = SILENT
    if track.hung_since_ns is not None:
        states[_share([track.hung_since_ns, track.end_ns], edges, width) > 0] = overdue
    states[alive == 0] = ABSENT
    return states


_Level = dict[int, Sequence[int]]
"""Beginnings and ends of intervals of sections at one depth, by section."""


def _paint(states: States, level: _Level, edges: Int64s, width: Int64s, alive: Shares, length: int) -> None:
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
        if sum(level[section][1::2]) - sum(level[section][::2]) < _RARE * length:
            states[(share >= _SALIENT) & (states != ABSENT)] = _state(section)


def _state(section: npt.ArrayLike, *, is_sum: bool = False) -> States:
    numbers = np.minimum(np.asarray(section, dtype=np.int64), MOST_SECTIONS)
    return (2 * numbers + FIRST_SECTION + is_sum).astype(np.uint8)


def _levels(track: Track) -> list[_Level]:
    """Return the intervals by depth and section, outermost first."""
    found: dict[int, _Level] = {}
    for (depth, section), spans in sorted(track.spans.items()):
        found.setdefault(depth, {})[section] = spans
    for section, depth, begun_ns in track.still_open:
        level = found.setdefault(depth, {})
        level[section] = [*level.get(section, ()), begun_ns, track.end_ns]
    return [found[depth] for depth in sorted(found)]


def _sums(track: Track) -> Iterator[tuple[int, Int64s]]:
    """Yield the sections of which only sums are known, each with its minutes: beginnings and ends."""
    minutes = track.minutes
    begin_ns, end_ns = minutes[:, FROM].copy(), minutes[:, TO]
    # before the first iteration a rank starts; after the last one it hangs, or saves
    begin_ns[:1] = np.where(minutes[:1, FIRST_NS] > 0, minutes[:1, FIRST_NS], begin_ns[:1])
    steps = minutes[:, LAST] - minutes[:, FIRST]
    step_ns = (minutes[:, LAST_NS] - minutes[:, FIRST_NS]) // np.maximum(1, steps)
    end_ns = np.where(steps > 0, np.minimum(end_ns, minutes[:, LAST_NS] + step_ns), end_ns)
    counts = minutes[:, SUMMED_NS] >= _SALIENT * (end_ns - begin_ns)
    for section in np.unique(minutes[counts, SUMMED]):
        mine = counts & (minutes[:, SUMMED] == section)
        if section >= 0:
            yield int(section), np.stack([begin_ns[mine], end_ns[mine]], axis=1).ravel()


def _share(spans: Sequence[int] | Int64s, edges: Int64s, width: Int64s) -> Shares:
    """Return the share of each column that these spans cover: beginnings and ends, in order."""
    if not len(spans):
        return np.zeros(len(width))
    origin = int(edges[0])  # small numbers: a float can't hold ns since the epoch
    corners = np.maximum.accumulate(np.asarray(spans, dtype=np.int64) - origin)
    covered = np.zeros(len(corners), dtype=np.int64)
    covered[1::2] = np.cumsum(corners[1::2] - corners[::2])
    covered[2::2] = covered[1:-1:2]
    upto = np.interp(edges - origin, corners, covered)
    shares: Shares = (upto[1:] - upto[:-1]) / width
    return shares
