"""Which snapshots nodes copy that take differently long for it."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_ft.core.memory.copy_pace import CopyPace


class Nodes:
    """Nodes that save in each interval, and copy for so many. What all have said, or a later one, is decided."""

    def __init__(self, *takes: float, interval: int = 1, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._interval = interval
        self._takes = takes
        self._paces = [CopyPace() for _ in takes]
        self._until = [0.0] * len(takes)
        self._copying: list[int | None] = [None] * len(takes)
        self.done = [0] * len(takes)
        self.copied: list[list[int]] = [[] for _ in takes]
        self.complete: list[float] = []
        """When there was another complete one."""

    def run(self, intervals: int) -> None:
        offsets = [self._chance.uniform(0.0, 0.3) for _ in self._takes]
        for tick in range(intervals * 20):
            now = tick / 20
            for at, pace in enumerate(self._paces):
                if self._copying[at] is not None and self._until[at] <= now:
                    self._say(at, now)
                newest = int(max(0.0, now - offsets[at])) * self._interval
                is_free = self._copying[at] is None and self.done[at] <= min(self.done)
                if newest:
                    pace.saw(newest, is_free=is_free)
                if is_free and (taken := pace.take()) is not None:
                    self._copying[at] = taken
                    self._until[at] = now + self._takes[at] * self._chance.uniform(0.8, 1.2)

    def _say(self, at: int, now: float) -> None:
        done = self._copying[at]
        assert done is not None
        self.done[at], self._copying[at] = done, None
        self.copied[at].append(done)
        if all(done in each for each in self.copied):
            self.complete.append(now)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "takes", [(3.5, 0.5, 1.7), (5.0, 4.9, 5.1), (0.9, 7.5, 2.1), (2.0, 2.2, 1.8), (1.0, 1.0, 1.0, 6.0)]
)
def test_nodes_that_take_differently_long_copy_common_snapshots(takes: tuple[float, ...], seed: int) -> None:
    nodes = Nodes(*takes, seed=seed)
    nodes.run(400)
    apart = [after - before for before, after in itertools.pairwise([0.0, *nodes.complete, 400.0])]
    assert max(apart) <= 12 * max(takes)
    assert len(nodes.complete) >= 400 / (6 * max(takes))


def test_snapshot_that_is_due_while_the_node_is_busy_waits() -> None:
    pace = CopyPace()
    pace.saw(1, is_free=True)
    assert pace.take() == 1
    pace.saw(2, is_free=False)
    pace.saw(3, is_free=False)
    assert pace.waiting == 2
    pace.saw(4, is_free=False)
    assert pace.take() == 4
    assert pace.take() is None


def test_copies_become_more_frequent_again_after_many_quick_ones() -> None:
    pace, taken = CopyPace(), []
    pace.saw(1, is_free=True)
    pace.saw(2, is_free=False)
    pace.take()
    for iteration in range(3, 200):
        pace.saw(iteration, is_free=True)
        taken += [each for each in [pace.take()] if each is not None]
    assert taken[:3] == [4, 6, 8]
    assert taken[-3:] == [197, 198, 199]
