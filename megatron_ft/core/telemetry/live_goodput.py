"""Goodput of a job that runs, by the records of one launcher and the boards of its ranks. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.core.facts.monitor import FirstIteration, RankGone
from megatron_ft.core.facts.timed import Timed
from megatron_ft.core.goodput.classify import Goodput, classify


class LiveGoodput:
    """Collects what `classify` needs. Times are those of CLOCK_MONOTONIC, as in the records."""

    def __init__(self, now_ns: int) -> None:
        self._begin_ns = now_ns
        self._events: list[Timed[Record]] = []
        self._begun: set[tuple[int, int]] = set()
        """Cycle and rank of each first iteration."""

    def hear(self, record: Record, at_ns: int) -> None:
        """Take a record of the launcher, or of a monitor of its ranks."""
        self._events.append(_event(record, at_ns))

    def look(self, boards: Iterable[BoardSnapshot]) -> None:
        """Note the first iterations of ranks, of which a launcher has no records."""
        for board in boards:
            cycle, rank, iteration, at_ns = board.cycle, board.rank, board.first_iteration, board.first_iteration_at_ns
            if iteration is not None and (cycle, rank) not in self._begun:
                self._begun.add((cycle, rank))
                self.hear(FirstIteration(rank=rank, cycle=cycle, iteration=iteration, at_ns=at_ns), at_ns)

    def ask(self, boards: Iterable[BoardSnapshot], now_ns: int) -> Callable[[], Goodput | None]:
        """Return a function for the classes of the seconds so far; it returns None if no rank has begun an iteration.

        After hundreds of restarts it takes a second, and may be called in another thread.
        """
        events = [*self._events, *(_still_running(board, now_ns) for board in boards)]
        return functools.partial(classify, events, begin_ns=self._begin_ns)


def _still_running(board: BoardSnapshot, now_ns: int) -> Timed[Record]:
    """Return how far a rank is, as if it had gone: the time until now is the training's."""
    gone = RankGone(
        rank=board.rank,
        cycle=board.cycle,
        iteration=board.iteration,
        last_transition_ns=board.last_transition_ns or None,
    )
    return _event(gone, now_ns)


def _event(record: Record, at_ns: int) -> Timed[Record]:
    return Timed(at_ns, 0, "", record)
