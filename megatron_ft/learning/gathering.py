"""Maxima of several members: of the ranks of a node at its launcher, of the nodes of a job at its leader. Pure.

The first news of a milestone has all other members asked for their intervals. The maxima are due when all have
answered, or after a while. The end of a run is due once all members have told it: what some do after the others' end
counts, too. A new leader knows nothing at first, and goes on from the next milestone. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from megatron_ft.learning.messages import MOST_NAMES, Intervals, Killed, Survey, merge

OF_RANKS_S, OF_NODES_S = 1.0, 2.0
"""Longest wait for answers; members that take longer are left out."""
BETWEEN_S = 1.0
"""Least time from a result to the next question, unless that was asked for."""


@dataclass
class Gathering:
    """Intervals of one cycle."""

    cycle: int
    wait_s: float
    awaited: set[int] = field(default_factory=set)
    """Members whose answers are missing."""
    _newest: dict[int, Intervals] = field(default_factory=dict)
    _fresh: set[int] = field(default_factory=set)
    """Members that have sent their intervals since the last result."""
    _gone: set[int] = field(default_factory=set)
    """Members whose run is over, or that are lost."""
    _in_run: set[int] | None = None
    """Members whose run goes on; None before the first end."""
    _reached: tuple[int, int] = (0, 0)
    """Milestones of the last result."""
    _is_wanted: bool = False
    _until_s: float | None = None
    """Time of the result, at the latest; None if nobody was asked."""
    _not_before_s: float = 0.0
    _killed: set[str] = field(default_factory=set)
    _has_ended: bool = False
    _is_over: bool = False

    @property
    def due_s(self) -> float | None:
        """Latest time of the next ``advance``; None too once the run is over, whatever a member still sends."""
        if self._is_over:
            return None
        return self._not_before_s if self._until_s is None and self._is_wanted else self._until_s

    @property
    def is_idle(self) -> bool:
        """True if nobody is awaited and nothing is to be asked or told."""
        return self._is_over or (self.due_s is None and not self._has_ended)

    def ask(self) -> None:
        """Have all members asked at once."""
        self._is_wanted, self._not_before_s = True, 0.0

    def hear(self, member: int, news: Intervals) -> None:
        """Take what a member has sent. Messages about other cycles are ignored."""
        if news.cycle != self.cycle:
            return
        before = self._newest.get(member, news)  # a monitor that replaces another one knows less
        self._newest[member] = replace(news, seen=merge(self.cycle, (before, news)).seen)
        self._is_wanted |= news.reached > self._reached
        self._fresh.add(member)
        self.awaited.discard(member)
        if news.ended:
            self._has_ended = True
            self.lost([member])
        else:  # a rank may have ended its monitoring, and begun it again
            self._gone.discard(member)
            if self._in_run is not None:
                self._in_run.add(member)

    def is_first(self, kill: Killed) -> bool:
        """Return True for the first kill by this timeout in this cycle, of which all others are to hear."""
        is_first = kill.cycle == self.cycle and kill.name not in self._killed and len(self._killed) < MOST_NAMES
        self._killed |= {kill.name} if is_first else set()
        return is_first

    def lost(self, members: Iterable[int]) -> None:
        """Await nothing from these any more. What they have sent still counts."""
        for member in members:
            self._gone.add(member)
            self.awaited.discard(member)
            if self._in_run is not None:
                self._in_run.discard(member)

    def advance(self, members: Callable[[], Collection[int]], now_s: float) -> list[Survey | Intervals]:
        """Return what is due: a question for those that are ``awaited``, or a result. ``members``: those in the run."""
        if self.is_idle:
            return []
        if self._has_ended and self._in_run is None:
            self._in_run = {*members()} - self._gone
        self._is_over = self._in_run == set()
        due: list[Survey | Intervals] = []
        if self._is_wanted and self._until_s is None and now_s >= self._not_before_s:
            self.awaited, self._until_s = {*members()} - self._fresh - self._gone, now_s + self.wait_s
            due += [Survey(self.cycle)] if self.awaited else []
        if self._is_over or (self._until_s is not None and (not self.awaited or now_s >= self._until_s)):
            result = merge(self.cycle, (news for _, news in sorted(self._newest.items())))
            due = [replace(result, ended=self._is_over)]
            self._is_wanted, self._until_s, self._not_before_s = False, None, now_s + BETWEEN_S
            self._reached, self._fresh, self.awaited = result.reached, set(), set()
        return due
