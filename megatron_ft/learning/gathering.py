"""Maxima of several members: of the ranks of a node at its launcher, of the nodes of a job at its leader. Pure.

The first news of a milestone begins the wait for the other members. The end of a run is due once all have told it: what
some do after the others' end counts, too. A new leader knows nothing at first, and goes on from the next milestone.
Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from msgspec.structs import replace

from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.leader_part import Answers, LeaderPart, ToNodes
from megatron_ft.job.rules.nodes import Node
from megatron_ft.learning.messages import Intervals, Killed, merge

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

    def hear(self, member: int, news: Intervals, now_s: float) -> None:
        """Take what a member has sent. Messages about other cycles are ignored."""
        if news.cycle != self.cycle or self._is_over:
            return
        # a monitor that replaces another one knows less
        seen = merge(self.cycle, (self._newest.get(member, news), news)).seen
        self._newest[member] = replace(news, seen=seen)
        if news.reached > self._milestone and self.due_s is None:
            self._milestone, self.due_s = news.reached, now_s + self.wait_s

    def take(self, members: Callable[[], Collection[int]], now_s: float) -> Intervals | None:
        """Return the maxima if they are due. ``members``: those whose run may go on; only called if that matters."""
        some_ended = any(each.ended for each in self._newest.values())
        if self._is_over or (self.due_s is None and not some_ended):
            return None
        nothing = Intervals(self.cycle)
        awaited = [each for member in members() if not (each := self._newest.get(member, nothing)).ended]
        self._is_over = some_ended and not awaited
        if self.due_s is not None and all(each.reached >= self._milestone for each in awaited):
            self.due_s = min(self.due_s, max(now_s, self._not_before_s))
        if not self._is_over and (self.due_s is None or now_s < self.due_s):
            return None
        result = merge(self.cycle, (news for _, news in sorted(self._newest.items())))
        self._milestone, self.due_s, self._not_before_s = result.reached, None, now_s + BETWEEN_S
        return replace(result, ended=self._is_over)


class LearningAtLeader(LeaderPart):
    """The leader tells all nodes the longest intervals of the job, and the first kill by each learned timeout."""

    HEARS = SAYS = Intervals | Killed

    def begin(self, cycle: JobCycle) -> Answers:
        self._cycle, self._gathering, self._killed = cycle, Gathering(cycle.decision.cycle, OF_NODES_S), set[str]()
        return ()

    @property
    def due_s(self) -> float | None:
        return self._gathering.due_s

    def hear(self, node: Node, place: int, message: Intervals | Killed, now_s: float) -> Answers:
        if isinstance(message, Intervals):
            self._gathering.hear(place, message, now_s)
        elif message.cycle == self._gathering.cycle and message.name not in self._killed:
            self._killed.add(message.name)
            return [ToNodes(message, {*range(len(self._cycle.seats))} - {place})]
        return []

    def tick(self, now_s: float) -> Answers:
        result = self._gathering.take(lambda: self._cycle.healthy, now_s)
        return [] if result is None else [ToNodes(result)]
