"""Histograms of section times, from the events on the boards of a node's ranks. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ft.core.board.layout import EVENT_END, EVENT_START, KIND_SHIFT, SECTION_SHIFT, BoardSnapshot

BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""Upper bounds of the buckets but the last, which has none."""


@dataclass(slots=True)
class Histogram:
    """Number of section times in each bucket of `BOUNDS_S` and in the last one, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> Histogram:
        """Return one that doesn't change any more."""
        return Histogram(list(self.counts), self.sum_s)


@dataclass(slots=True)
class _Read:
    """What was read of the board of one rank in one cycle."""

    cycle: int
    read_to: int = 0
    since_ns: dict[int, int] = field(default_factory=dict)
    """Opening time of each open section, by index."""


class SectionTimes:
    """Section times of the ranks of one node, of all its cycles together."""

    def __init__(self) -> None:
        self._found: dict[str, Histogram] = {}
        self._ranks: dict[int, _Read] = {}

    def read_to(self, local_rank: int, board: BoardSnapshot) -> int:
        """Return the number of the first event to feed next."""
        return self._of(local_rank, board).read_to

    def feed(self, local_rank: int, board: BoardSnapshot, first: int, words: Sequence[int]) -> None:
        """Count the sections that have ended in these events: two words each, from number ``first`` on."""
        read = self._of(local_rank, board)
        if first > read.read_to:
            read.since_ns.clear()  # events were lost
        read.read_to = first + len(words) // 2
        for at_ns, code in zip(words[::2], words[1::2], strict=True):
            kind, index = code >> KIND_SHIFT, code >> SECTION_SHIFT & 0xFF
            if kind == EVENT_START:
                read.since_ns[index] = at_ns
            elif kind == EVENT_END and index < len(board.sections):
                since_ns = read.since_ns.pop(index, None)
                if since_ns is not None and at_ns >= since_ns:
                    name = board.sections[index].name
                    self._found.setdefault(name, Histogram()).add((at_ns - since_ns) / 1e9)

    def histograms(self) -> Mapping[str, Histogram]:
        """Return a copy by section."""
        return {name: found.copy() for name, found in self._found.items()}

    def _of(self, local_rank: int, board: BoardSnapshot) -> _Read:
        read = self._ranks.get(local_rank)
        if read is None or read.cycle != board.cycle:
            read = self._ranks[local_rank] = _Read(board.cycle)
        return read
