"""The timeline as a grid for the pictures: each rank's main state in each column of time. Pure.

The last events of a rank are drawn as they were, what was before minute by minute: a section of which a minute had more
than six intervals is spread evenly over it.

A run may have millions of spans, and a picture some thousand columns: both pictures are drawn from the grid, so that
they cost the same for two ranks and for thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron_ft.cli.analysis.failures import found_culprits
from megatron_ft.cli.analysis.timeline import Timeline, Track
from megatron_ft.cli.logs.progress import Int64s

ABSENT, HUNG, WAITING, SILENT, OUTSIDE, FIRST_SECTION = range(6)
_SPECIAL = ("no process", "hung", "waits for the hung rank", "nothing recorded", "out of section")
MOST_SECTIONS = 250
"""Sections with a state of their own, which is a byte; the others share one."""
_RARE, _SALIENT = 0.05, 0.1  # a section open for less than this share of a rank's life shows in a column from that on

_DEEPEST = 32

Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """States of ranks (rows) in columns of time.

    Args:
        states: ABSENT, HUNG (from the beginning of what the verdict is about), WAITING
        (the same of a rank that isn't the culprit of a finding), SILENT (nothing recorded), OUTSIDE, or
        FIRST_SECTION + the section's index (at most MOST_SECTIONS). The innermost section counts.
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
    culprits = {cycle: found_culprits(timeline, cycle) for cycle in timeline.tracks_by_cycle}
    for track in timeline.tracks:
        if track.end_ns < edges[0] or track.begin_ns >= edges[-1]:
            continue
        # only the columns in which it lived: a run of a hundred cycles has a hundred tracks for each rank
        first = max(0, int(np.searchsorted(edges, track.begin_ns, side="right")) - 1)
        end = min(len(edges) - 1, max(first + 1, int(np.searchsorted(edges, track.end_ns, side="left"))))
        waits = bool(culprits[track.cycle]) and track.rank not in culprits[track.cycle]
        mine = _states(track, edges[first : end + 1], WAITING if waits else HUNG)
        row = states[rows[track.rank]][first:end]
        # where two cycles share a column, a hang wins, else the later one
        fresh = (mine != ABSENT) & (row != HUNG) & (row != WAITING)
        row[fresh] = mine[fresh]
    return Grid(states=states, ranks=ranks, edges_ns=edges)


def _states(track: Track, edges: Int64s, overdue: int) -> npt.NDArray[np.uint8]:
    width = np.diff(edges)
    alive = _share([(track.begin_ns, track.end_ns)], edges, width)
    states = np.where(alive > 0.5, OUTSIDE, ABSENT).astype(np.uint8)
    if track.end_ns - track.begin_ns < width[0]:
        states[alive > 0] = OUTSIDE  # a short life must not vanish
    lived = states != ABSENT
    exact = _share(_exact(track), edges, width)
    known = np.minimum(_share(_covered(track), edges, width) + exact, alive)
    painted = states.copy()
    _paint_sections(states, track, _levels_of_minutes(track), edges, width, alive)
    _paint_sections(painted, track, _levels_of_events(track), edges, width, alive)
    is_exact = exact > 0.5 * alive
    states[is_exact] = painted[is_exact]
    states[lived & (known < 0.5 * alive)] = SILENT
    if track.hang is not None:
        hung = _share([(track.hang.since_ns, track.end_ns)], edges, width)
        states[hung > 0] = overdue
    states[alive == 0] = ABSENT
    return states


def _exact(track: Track) -> list[tuple[int, int]]:
    """Return the times of which the events themselves are known."""
    spans = track.spans
    if spans is None or spans.end_ns <= spans.begin_ns:
        return []
    corners = [spans.begin_ns, *(at for span in spans.unknown for at in span), max(spans.end_ns, track.end_ns)]
    return list(zip(corners[::2], corners[1::2], strict=True))


def _covered(track: Track) -> list[tuple[int, int]]:
    """Return the times that minutes tell of; the first and the last stand for the rest of the rank's life, too."""
    corners = [at for minute in track.minutes for at in (minute.from_ns, minute.to_ns)]
    corners[:1], corners[-1:] = ([track.begin_ns], [track.end_ns]) if corners else ([], [])
    return list(zip(corners[::2], corners[1::2], strict=True))


def _paint_sections(
    states: npt.NDArray[np.uint8], track: Track, levels: _Levels, edges: Int64s, width: Int64s, alive: Shares
) -> None:
    """Paint level by level, outermost first: sections that together fill half of a column take it.

    A rare section takes a column with less: otherwise a checkpoint shorter than two columns would show or not depending
    on where it lies.
    """
    length = max(1, track.end_ns - track.begin_ns)
    for level in levels:
        shares = {section: stretches.share(edges, width) for section, stretches in level.items()}
        if not shares:
            continue
        sections = np.array(list(shares), dtype=np.uint16)
        each = np.stack(list(shares.values()))
        best = sections[each.argmax(axis=0)]
        taken = (each.sum(axis=0) >= 0.5 * np.maximum(alive, 1e-12)) & (states != ABSENT) & (each.max(axis=0) > 0)
        states[taken] = _state(best[taken])
        for section, share in shares.items():
            if sum(level[section].open_ns) < _RARE * length:
                states[(share >= _SALIENT) & (states != ABSENT)] = _state(np.uint16(section))


def _state(section: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    return (np.minimum(np.asarray(section, dtype=np.int64), MOST_SECTIONS) + FIRST_SECTION).astype(np.uint8)


@dataclass
class _Stretches:
    """Times in which a section was open, in order: for all of each, or for a part spread evenly over it."""

    begin_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    open_ns: list[int] = field(default_factory=list)

    def add(self, begin_ns: int, end_ns: int, open_ns: int | None = None) -> None:
        self.begin_ns.append(begin_ns)
        self.end_ns.append(end_ns)
        self.open_ns.append(end_ns - begin_ns if open_ns is None else min(open_ns, end_ns - begin_ns))

    def share(self, edges: Int64s, width: Int64s) -> Shares:
        """Return the share of each column in which the section was open."""
        begin, end, open_ = (np.array(each, dtype=np.int64) for each in (self.begin_ns, self.end_ns, self.open_ns))
        return _share_of(begin, end, open_, edges, width)


_Levels = list[dict[int, _Stretches]]
"""By depth and section."""


def _at(levels: _Levels, depth: int, section: int) -> _Stretches:
    while len(levels) <= depth:
        levels.append({})
    return levels[depth].setdefault(section, _Stretches())


def _levels_of_events(track: Track) -> _Levels:
    """Return the sections among the last events; those that never ended go to the end."""
    levels: _Levels = []
    if track.spans is None:
        return levels
    closed = track.spans.closed
    columns = (closed.depths, closed.sections, closed.begin_ns, closed.end_ns)
    for depth, section, begin_ns, end_ns in zip(*(each.tolist() for each in columns), strict=True):
        _at(levels, depth, section).add(begin_ns, end_ns)
    for depth, (section, begun_ns) in enumerate(track.still_open()):
        _at(levels, depth, section).add(begun_ns, track.end_ns)
    return levels


def _levels_of_minutes(track: Track) -> _Levels:
    levels: _Levels = []
    for number, minute in enumerate(track.minutes):
        # before the first iteration, the first minute of a rank is its start
        begins_s = minute.of.iterations[0][1] if number == 0 and minute.of.iterations else minute.of.from_s
        for section, of in minute.of.sections.items():
            if section in track.numbers:
                mine = _at(levels, min(of.depth, _DEEPEST), track.numbers[section])
                for begin_s, length_s in of.spans:
                    mine.add(minute.wall_ns(begin_s), minute.wall_ns(begin_s + length_s))
                if not of.spans and of.total_s:
                    mine.add(minute.wall_ns(begins_s), minute.to_ns, round(of.total_s * 1e9))
    for section, of in track.minutes[-1].of.sections.items() if track.minutes else ():
        if section in track.numbers and of.open_s >= 0:
            begun_ns = track.minutes[-1].to_ns - round(of.open_s * 1e9)
            _at(levels, min(of.depth, _DEEPEST), track.numbers[section]).add(begun_ns, track.end_ns)
    return levels


def _share(spans: Sequence[tuple[int, int]], edges: Int64s, width: Int64s) -> Shares:
    begin = np.array([begin for begin, _ in spans], dtype=np.int64)
    end = np.array([end for _, end in spans], dtype=np.int64)
    return _share_of(begin, end, end - begin, edges, width)


def _share_of(begin: Int64s, end: Int64s, open_: Int64s, edges: Int64s, width: Int64s) -> Shares:
    """Return the share of each column covered by these spans, of which ``open_`` counts; they are in order."""
    if not len(begin):
        return np.zeros(len(width))
    origin = int(edges[0])  # small numbers: a float can't hold ns since the epoch
    corners = np.maximum.accumulate(np.stack([begin, end], axis=1).ravel() - origin)
    lengths = np.diff(corners, prepend=corners[0])
    weights = np.zeros(len(corners))
    weights[1::2] = open_ / np.maximum(end - begin, 1)
    return np.diff(np.interp(edges - origin, corners, np.cumsum(lengths * weights))) / width
