"""Spans from the events of a rank: which section was open from when to when. Pure.

Nothing is invented. Where events are missing, a span that may have been open is left out, and the time is marked as
unknown. A section that never closed is kept apart: its duration isn't known.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megatron_ft.cli.logs.progress import Int64s, ProgressEvents
from megatron_ft.core.board.layout import EVENT_END, EVENT_START

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """Sections that were opened and closed; times in ns on the clock of the events.

    Args:
        sections: index of each span's name in the names of the events.
        depths: number of other sections open when each span began.
    """

    begin_ns: Int64s
    end_ns: Int64s
    sections: npt.NDArray[np.uint16]
    depths: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankSpans:
    """Events of one rank in one cycle; times in ns on the clock of the events.

    Args:
        closed: sections with a beginning and an end, in the order of their beginnings.
        still_open: section and beginning of those that never ended, outermost first.
        unknown: beginnings and ends of the times between the first and the last event whose events aren't here.
        begin_ns, end_ns: first and last event; 0 without one.
    """

    names: tuple[str, ...]
    closed: Spans
    still_open: tuple[tuple[int, int], ...]
    unknown: tuple[tuple[int, int], ...]
    begin_ns: int
    end_ns: int


def spans_of(events: ProgressEvents) -> RankSpans:
    """Return the spans of these events."""
    stretches = _Stretches()
    cuts = sorted({0, *(gap for gap in events.gaps if gap < len(events.at_ns)), len(events.at_ns)})
    for first, end in itertools.pairwise(cuts):
        stretches.add(events, first, end)
    if len(events.at_ns) in events.gaps:
        stretches.still_open = []
    return RankSpans(
        names=events.names,
        closed=stretches.closed(),
        still_open=tuple(stretches.still_open),
        unknown=_unknown(events),
        begin_ns=int(events.at_ns[0]) if len(events.at_ns) else 0,
        end_ns=int(events.at_ns[-1]) if len(events.at_ns) else 0,
    )


@dataclass
class _Stretches:
    """Spans of stretches of events; between two stretches, events are missing."""

    begin_ns: list[Int64s] = field(default_factory=list)
    end_ns: list[Int64s] = field(default_factory=list)
    sections: list[npt.NDArray[np.uint16]] = field(default_factory=list)
    depths: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    still_open: list[tuple[int, int]] = field(default_factory=list)

    def add(self, events: ProgressEvents, first: int, end: int) -> None:
        """Add the next stretch: events ``first`` to ``end`` (exclusive), without a loss."""
        kinds = events.kinds[first:end]
        which = np.nonzero(kinds <= EVENT_END)[0]
        at_ns, starts = events.at_ns[first:end][which], kinds[which] == EVENT_START
        sections = events.sections[first:end][which]
        pairs = _pair(sections, starts)
        depths = _depths(len(which), pairs)
        order = np.argsort(pairs.begins, kind="stable")
        begins, ends = pairs.begins[order], pairs.ends[order]
        self.begin_ns.append(at_ns[begins])
        self.end_ns.append(at_ns[ends])
        self.sections.append(sections[begins])
        self.depths.append(np.minimum(depths[begins], 255).astype(np.uint8))
        self.still_open = [(int(sections[at]), int(at_ns[at])) for at in np.sort(pairs.open)]

    def closed(self) -> Spans:
        none = np.empty(0, dtype=np.int64)
        return Spans(
            begin_ns=_joined(self.begin_ns, none),
            end_ns=_joined(self.end_ns, none),
            sections=_joined(self.sections, none.astype(np.uint16)),
            depths=_joined(self.depths, none.astype(np.uint8)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pairs:
    """Indices of events: starts and their ends; starts without an end; ends without a start."""

    begins: npt.NDArray[np.intp]
    ends: npt.NDArray[np.intp]
    open: npt.NDArray[np.intp]
    orphans: npt.NDArray[np.intp]


def _pair(sections: npt.NDArray[np.uint16], starts: npt.NDArray[np.bool_]) -> _Pairs:
    """Pair starts and ends: a section's own events alternate, however sections nest."""
    by_section = np.argsort(sections, kind="stable")
    of, is_start = sections[by_section], starts[by_section]
    last_of_section = np.append(of[1:] != of[:-1], True)[: len(of)]
    first_of_section = np.insert(of[1:] != of[:-1], 0, True)[: len(of)]
    pairs = np.nonzero(is_start[:-1] & ~is_start[1:] & ~last_of_section[:-1])[0]
    return _Pairs(
        begins=by_section[pairs],
        ends=by_section[pairs + 1],
        open=by_section[is_start & last_of_section],
        orphans=by_section[~is_start & first_of_section],
    )


def _depths(length: int, pairs: _Pairs) -> Int64s:
    """Return the number of open sections before each event.

    A section whose end has no start was open when the stretch began.
    """
    change = np.zeros(length, dtype=np.int64)
    change[pairs.begins] = 1
    change[pairs.open] = 1
    change[pairs.ends] = -1
    change[pairs.orphans] = -1
    return np.cumsum(change) + len(pairs.orphans) - change


def _unknown(events: ProgressEvents) -> tuple[tuple[int, int], ...]:
    """Return the times between two stretches."""
    inside = [gap for gap in events.gaps if 0 < gap < len(events.at_ns)]
    return tuple((int(events.at_ns[gap - 1]), int(events.at_ns[gap])) for gap in sorted(set(inside)))


def _joined(parts: Sequence[npt.NDArray[_T]], none: npt.NDArray[_T]) -> npt.NDArray[_T]:
    return np.concatenate([none, *parts], axis=-1)
