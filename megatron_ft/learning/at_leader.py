"""Learning at the leader of a job: a part of it. All nodes are told the longest intervals of the job. Pure."""

from __future__ import annotations

from megatron_ft.job.rules.job_cycle import JobCycle
from megatron_ft.job.rules.leader_part import Answers, LeaderPart, ToNodes
from megatron_ft.job.rules.nodes import Node
from megatron_ft.learning.gathering import OF_NODES_S, Gathering
from megatron_ft.learning.messages import Intervals, Killed


class LearningAtLeader(LeaderPart):
    HEARS = SAYS = Intervals | Killed

    def __init__(self) -> None:
        self._cycle: JobCycle
        self._gathering = Gathering(-1, OF_NODES_S)
        self._killed: set[str] = set()

    @property
    def due_s(self) -> float | None:
        return self._gathering.due_s

    def begin(self, cycle: JobCycle) -> Answers:
        self._cycle, self._gathering, self._killed = cycle, Gathering(cycle.decision.cycle, OF_NODES_S), set()
        return ()

    def hear(self, node: Node, place: int, message: Intervals | Killed, now_s: float) -> Answers:
        if isinstance(message, Intervals):
            self._gathering.hear(place, message, now_s)
        elif message.cycle == self._gathering.cycle and message.name not in self._killed:
            self._killed.add(message.name)
            return [ToNodes(message, {*range(len(self._cycle.seats))} - {place})]
        return []

    def tick(self, now_s: float) -> Answers:
        result = None if self._gathering.is_idle else self._gathering.take(self._cycle.healthy, now_s)
        return [] if result is None else [ToNodes(result)]
