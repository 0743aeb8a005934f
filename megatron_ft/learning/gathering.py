"""Maxima of several members: of the ranks of a node at its launcher, of the nodes of a job at its leader. Pure.

Members send their intervals at each milestone. The first news of one begins the wait for the others, which ends when
all members have reached that milestone, as a collective would, or after a while. The end of a run is due once all
members have told it: what some do after the others' end counts, too. A new leader knows nothing at first, and goes on
from the next milestone. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from msgspec.structs import replace

from megatron_ft.learning.messages import Intervals, merge

OF_RANKS_S, OF_NODES_S = 60.0, 70.0
"""Longest wait for the other members of a node, of a job; members that take longer are left out."""
BETWEEN_S = 1.0
"""Least time between two results: a script may save in each step."""


@dataclass
class Gathering:
    """Intervals of one cycle."""

    cycle: int
    wait_s: float
    due_s: float | None = None
    """Time of the next result, at the latest; None if no milestone was reached since the last one."""
    _not_before_s: float = 0.0
    _newest: dict[int, Intervals] = field(default_factory=dict)
    _milestone: tuple[int, int] = (0, 0)
    """Milestone that all are to reach; while no result is due, that of the last one."""
    _is_over: bool = False

    @property
    def is_idle(self) -> bool:
        """True if no result can be due; always once the run is over."""
        return self._is_over or (self.due_s is None and not any(each.ended for each in self._newest.values()))

    def hear(self, member: int, news: Intervals, now_s: float) -> None:
        """Take what a member has sent. Messages about other cycles are ignored."""
        if news.cycle != self.cycle or self._is_over:
            return
        # a monitor that replaces another one knows less
        seen = merge(self.cycle, (self._newest.get(member, news), news)).seen
        self._newest[member] = replace(news, seen=seen)
        if news.reached > self._milestone and self.due_s is None:
            self._milestone, self.due_s = news.reached, now_s + self.wait_s

    def take(self, members: Collection[int], now_s: float) -> Intervals | None:
        """Return the maxima if they are due. ``members``: those whose run may go on."""
        if self.is_idle:
            return None
        nothing = Intervals(self.cycle)
        awaited = [each for member in members if not (each := self._newest.get(member, nothing)).ended]
        self._is_over = not awaited and any(each.ended for each in self._newest.values())
        if self.due_s is not None and all(each.reached >= self._milestone for each in awaited):
            self.due_s = min(self.due_s, max(now_s, self._not_before_s))
        if not self._is_over and (self.due_s is None or now_s < self.due_s):
            return None
        result = merge(self.cycle, (news for _, news in sorted(self._newest.items())))
        self._milestone, self.due_s, self._not_before_s = result.reached, None, now_s + BETWEEN_S
        return replace(result, ended=self._is_over)
