"""The timeline as a grid for the pictures: each rank's main state in each column of time. Pure.

A run may have millions of spans, and a picture some thousand columns: both pictures are drawn from the grid, so that
they cost the same for two ranks and for thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ft.cli.analysis.timeline import Timeline, Track
from megatron_ft.cli.logs.progress import Int64s

ABSENT, HUNG, SILENT, OUTSIDE, FIRST_SECTION = range(5)
_SPECIAL = ("no process", "hung", "nothing recorded", "out of section")
MOST_SECTIONS = 250
"""Sections with a state of their own, which is a byte; the others share one."""
_RARE, _SALIENT = 0.05, 0.1  # a section open for less than this share of a rank's life shows in a column from that on

Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """States of ranks (rows) in columns of time.

    Args:
        states: ABSENT, HUNG (from the beginning of what the verdict is about), SILENT (no `progress` records, or some
        were lost), OUTSIDE, or FIRST_SECTION + the section's index (at most MOST_SECTIONS). The innermost section
        counts.
        edges_ns: edges of the columns, wall ns: one more than there are columns.
    """

    states: npt.NDArray[np.uint8]
    ranks: tuple[int, ...]
    edges_ns: Int64s


def state_names(names: Sequence[str]) -> list[str]:
    """Return the names of the numbers in ``Grid.states``."""
    return [*_SPECIAL, *names[:MOST_SECTIONS], *(["other sections"] if len(names) > MOST_SECTIONS else [])]


def edges_ns(begin_ns: int, end_ns: int, columns: int) -> Int64s:
    """Return the edges of ``columns`` equal columns."""
    return np.linspace(0, max(1, end_ns - begin_ns), columns + 1).astype(np.int64) + begin_ns


def rasterize(timeline: Timeline, edges: Int64s) -> Grid:
    """Return the grid of all ranks between these edges."""
    ranks = tuple(timeline.ranks)
    states = np.zeros((len(ranks), len(edges) - 1), dtype=np.uint8)
    rows = {rank: row for row, rank in enumerate(ranks)}
    for track in timeline.tracks:
        if track.end_ns < edges[0] or track.begin_ns >= edges[-1]:
            continue
        # only the columns in which it lived: a run of a hundred cycles has a hundred tracks for each rank
        first = max(0, int(np.searchsorted(edges, track.begin_ns, side="right")) - 1)
        end = min(len(edges) - 1, max(first + 1, int(np.searchsorted(edges, track.end_ns, side="left"))))
        mine = _states(track, edges[first : end + 1])
        row = states[rows[track.rank]][first:end]
        # where two cycles share a column, a hang wins, else the later one
        fresh = (mine != ABSENT) & (row != HUNG)
        row[fresh] = mine[fresh]
    return Grid(states=states, ranks=ranks, edges_ns=edges)


def _states(track: Track, edges: Int64s) -> npt.NDArray[np.uint8]:
    width = np.diff(edges)
    alive = _share([(track.begin_ns, track.end_ns)], edges, width)
    states = np.where(alive > 0.5, OUTSIDE, ABSENT).astype(np.uint8)
    if track.end_ns - track.begin_ns < width[0]:
        states[alive > 0] = OUTSIDE  # a short life must not vanish
    lived = states != ABSENT
    if track.spans is None:
        states[lived] = SILENT
    else:
        _paint_sections(states, track, edges, width, alive)
        silent = _share(track.spans.unknown, edges, width)
        states[lived & (silent > 0.5 * alive)] = SILENT
    if track.hang is not None:
        hung = _share([(track.hang.since_ns, track.end_ns)], edges, width)
        states[hung > 0] = HUNG
    states[alive == 0] = ABSENT
    return states


def _paint_sections(states: npt.NDArray[np.uint8], track: Track, edges: Int64s, width: Int64s, alive: Shares) -> None:
    """Paint level by level, outermost first: sections that together fill half of a column take it.

    A rare section takes a column with less: otherwise a checkpoint shorter than two columns would show or not depending
    on where it lies.
    """
    length = max(1, track.end_ns - track.begin_ns)
    levels = _levels(track)
    for level in levels:
        shares = {section: _share_of(begin, end, edges, width) for section, (begin, end) in level.items()}
        if not shares:
            continue
        sections = np.array(list(shares), dtype=np.uint16)
        each = np.stack(list(shares.values()))
        best = sections[each.argmax(axis=0)]
        taken = (each.sum(axis=0) >= 0.5 * np.maximum(alive, 1e-12)) & (states != ABSENT) & (each.max(axis=0) > 0)
        states[taken] = _state(best[taken])
        for section, share in shares.items():
            begin, end = level[section]
            if (end - begin).sum() < _RARE * length:
                states[(share >= _SALIENT) & (states != ABSENT)] = _state(np.uint16(section))


def _state(section: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    return (np.minimum(np.asarray(section, dtype=np.int64), MOST_SECTIONS) + FIRST_SECTION).astype(np.uint8)


def _levels(track: Track) -> list[dict[int, tuple[Int64s, Int64s]]]:
    """Return, by depth and section, beginnings and ends of spans; spans that never ended go to the end."""
    assert track.spans is not None
    closed = track.spans.closed
    levels: list[dict[int, tuple[Int64s, Int64s]]] = []
    for depth in range(int(closed.depths.max(initial=0)) + 1):
        at = closed.depths == depth
        sections, begin, end = closed.sections[at], closed.begin_ns[at], closed.end_ns[at]
        levels.append(
            {int(s): (begin[sections == s], end[sections == s]) for s in np.unique(sections)},
        )
    for depth, (section, begun) in enumerate(track.still_open()):
        if depth == len(levels):
            levels.append({})
        begin, end = levels[depth].get(section, (np.empty(0, np.int64), np.empty(0, np.int64)))
        levels[depth][section] = (np.append(begin, begun), np.append(end, track.end_ns))
    return levels


def _share(spans: Sequence[tuple[int, int]], edges: Int64s, width: Int64s) -> Shares:
    begin = np.array([begin for begin, _ in spans], dtype=np.int64)
    end = np.array([end for _, end in spans], dtype=np.int64)
    return _share_of(begin, end, edges, width)


def _share_of(begin: Int64s, end: Int64s, edges: Int64s, width: Int64s) -> Shares:
    """Return the share of each column covered by these spans, which don't overlap and are in order."""
    if not len(begin):
        return np.zeros(len(width))
    origin = int(edges[0])  # small numbers: a float can't hold ns since the epoch
    corners = np.maximum.accumulate(np.stack([begin, end], axis=1).ravel() - origin)
    covered = np.cumsum(np.diff(corners, prepend=corners[0]) * (np.arange(len(corners)) % 2))
    return np.diff(np.interp(edges - origin, corners, covered)) / width
