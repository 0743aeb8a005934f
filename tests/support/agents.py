"""The launcher's machine, without a launcher: events are told, time is virtual, and what it asks for is kept."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from megatron_ft.core.agent import edge
from megatron_ft.core.agent.agent import Agent
from megatron_ft.core.agent.record import CycleRecord
from megatron_ft.core.agent.turn import Options
from megatron_ft.core.board.layout import BoardSnapshot, CollectiveCounts
from megatron_ft.core.codec import name_of
from megatron_ft.core.diagnosis.exceptions import CrashOutput
from megatron_ft.core.job import edge as job
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.decisions import Decision, Held, Kind
from megatron_ft.core.job.restart_policy import Action, Outcome
from megatron_ft.core.pauses import Pauses

__all__ = ["Driven", "held", "verdict"]

T = TypeVar("T")
START_NS = 1_000_000_000_000


def held(cycle: int = 0, *, place: int = 0, nodes: int = 1, restarts: int = 0) -> Held:
    """A cycle that begins."""
    decision = Decision(cycle, (0, "c", cycle), Kind.CYCLE, cycle, nodes, nodes, 0, restarts=restarts)
    return Held(decision, place, votes=True, store="here:1")


def verdict(
    cycle: int = 0, outcome: Outcome = Outcome.FAILED, action: Action = Action.RESTART, text: str = "", **more: object
) -> job.Conclude:
    """Why that cycle has ended."""
    fields = {"cycle": cycle, "outcome": outcome, "text": text, "action": action, "restarts_left": 2, **more}
    return job.Conclude(m.Verdict(**fields))  # type: ignore[arg-type]


class Driven:
    """One agent. ``boards``, ``words``, ``stopped``, ``collectives`` and such are what it sees, by local rank."""

    def __init__(self, **options: object) -> None:
        self.pauses = Pauses()
        self.agent = Agent(Options(**options), self.pauses)  # type: ignore[arg-type]
        self.now_ns = START_NS
        self.done: list[edge.Effect] = []
        self.boards: dict[int, BoardSnapshot | None] = defaultdict(lambda: None)
        self.words: dict[int, CrashOutput] = defaultdict(CrashOutput)
        self.stopped: dict[int, bool] = defaultdict(bool)
        self.run_delays_ns: dict[int, Mapping[int, int]] = defaultdict(dict)
        self.collectives: dict[int, CollectiveCounts | None] = defaultdict(lambda: None)

    @property
    def record(self) -> CycleRecord:
        """Of its cycle."""
        return self.agent.cycle.record

    def hear(self, *events: edge.Event) -> list[edge.Effect]:
        """Tell it these; what it asks for then."""
        effects: list[edge.Effect] = []
        for event in events:
            seen = edge.Readings(
                self.boards, self.words, self.stopped, self.run_delays_ns, collectives=self.collectives
            )
            effects += self.agent.handle(event, self.now_ns, seen)
            alarm_ns = self.agent.alarm_ns
            # it would ring for ever
            assert not isinstance(event, edge.Tick) or alarm_ns is None or alarm_ns > self.now_ns, alarm_ns
        self.done += effects
        return effects

    def wait(self, seconds: float, *, late: bool = False) -> list[edge.Effect]:
        """Let time pass, with all its alarms; ``late``: they come when all that time is over."""
        effects: list[edge.Effect] = []
        until_ns = self.now_ns + round(seconds * 1e9)
        while (alarm_ns := self.agent.alarm_ns) is not None and alarm_ns <= until_ns:
            self.now_ns = until_ns if late else max(self.now_ns, alarm_ns)
            effects += self.hear(edge.Tick())
        self.now_ns = until_ns
        return effects

    def run(
        self, ranks: int = 2, cycle: int = 0, *, nodes: int = 1, place: int = 0, restarts: int = 0
    ) -> list[edge.Effect]:
        """A cycle begins, and its ranks are started: local rank n is rank 10 n, and process 100 + n."""
        met = edge.RanksMet([10 * local_rank for local_rank in range(ranks)], place, nodes, ranks * nodes)
        effects = self.hear(edge.Tick(), job.Begin(held(cycle, place=place, nodes=nodes, restarts=restarts)), met)
        for local_rank in range(ranks):
            effects += self.hear(edge.RankStarted(local_rank, 100 + local_rank, self.now_ns))
        return effects + self.hear(edge.RanksStarted())

    def exits(self, local_rank: int, code: int = 0, *, sent: tuple[int, ...] = ()) -> list[edge.Effect]:
        """A rank ends."""
        return self.hear(edge.RankExited(local_rank, code, self.now_ns, frozenset(sent)))

    def ends(
        self, outcome: Outcome = Outcome.FAILED, *, restarts: bool = True, lost: bool = False, text: str = ""
    ) -> list[edge.Effect]:
        """The coordinator ends the cycle."""
        return self.hear(job.EndRanks(m.End(self.agent.cycle.record.cycle, outcome, restarts, lost, text)))

    def stop(self, number: signal.Signals = signal.SIGTERM, *, again: bool = False) -> list[edge.Effect]:
        """The launcher is asked to stop."""
        return self.hear(edge.StopAsked(number, again))

    def all_of(self, kind: type[T]) -> list[T]:
        """What it has asked for so far of this kind."""
        return [effect for effect in self.done if isinstance(effect, kind)]

    @property
    def said(self) -> list[str]:
        """Its lines."""
        return [effect.text for effect in self.all_of(edge.Say)]

    @property
    def told(self) -> list[m.Said]:
        """What the coordinator has heard."""
        return [effect.message for effect in self.all_of(edge.Tell)]

    @property
    def written(self) -> list[str]:
        """The kinds of its records."""
        return [name_of(type(effect.record)) for effect in self.all_of(edge.Write)]
