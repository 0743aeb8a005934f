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

from megatron_ft.learning.messages import MOST_NAMES, Intervals, Killed, merge

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
    _ended: set[int] = field(default_factory=set)
    """Members whose run is over."""
    _awaited: tuple[int, int] = (0, 0)
    """Milestone that all are to reach."""
    _reached: tuple[int, int] = (0, 0)
    """Milestones of the last result."""
    _killed: set[str] = field(default_factory=set)
    _is_over: bool = False

    @property
    def is_idle(self) -> bool:
        """True if no result can be due; always once the run is over."""
        return self._is_over or (self.due_s is None and not self._ended)

    def hear(self, member: int, news: Intervals, now_s: float) -> None:
        """Take what a member has sent. Messages about other cycles are ignored."""
        if news.cycle != self.cycle or self._is_over:
            return
        before = self._newest.get(member, news)  # a monitor that replaces another one knows less
        self._newest[member] = replace(news, seen=merge(self.cycle, (before, news)).seen)
        # a rank may have ended its monitoring, and begun it again
        self._ended = self._ended | {member} if news.ended else self._ended - {member}
        if news.reached > self._reached and self.due_s is None:
            self._awaited, self.due_s = news.reached, now_s + self.wait_s

    def is_first(self, kill: Killed) -> bool:
        """Return True for the first kill by this timeout in this cycle, of which all others are to hear."""
        if kill.cycle != self.cycle or kill.name in self._killed or len(self._killed) >= MOST_NAMES:
            return False
        self._killed.add(kill.name)
        return True

    def take(self, members: Collection[int], now_s: float) -> Intervals | None:
        """Return the maxima if they are due. ``members``: those whose run may go on."""
        if self.is_idle:
            return None
        awaited = {*members} - self._ended
        has_all = all(each in self._newest and self._newest[each].reached >= self._awaited for each in awaited)
        self._is_over = bool(self._ended) and not awaited
        if self.due_s is not None and has_all:
            self.due_s = min(self.due_s, max(now_s, self._not_before_s))
        if not self._is_over and (self.due_s is None or now_s < self.due_s):
            return None
        result = merge(self.cycle, (news for _, news in sorted(self._newest.items())))
        self._reached, self.due_s, self._not_before_s = result.reached, None, now_s + BETWEEN_S
        return replace(result, ended=self._is_over)
