"""Learned timeouts in a simulated job: what toy ranks report, and what has to be true of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ft.core.board.layout import FACT_ENOUGH_STEPS, FACT_HOOKS, FACT_LEARNS, FACT_LOADED
from megatron_ft.ipc.wire import encode
from megatron_ft.job.rules import actions
from megatron_ft.learning.messages import FACT_SAVED, Intervals, Killed, Observed

if TYPE_CHECKING:
    from tests.simulation.job import Job
    from tests.simulation.plan import Plan

__all__ = ["STATE_PATH", "Learning", "ToyRank", "learning"]

STATE_PATH = "/ft_state.json"
_FACTS = FACT_LEARNS | FACT_HOOKS | FACT_LOADED | FACT_ENOUGH_STEPS | FACT_SAVED
_SECTIONS = ("setup", "step", "checkpointing", "out_of_section")


class ToyRank:
    """One rank of a cycle. The length of its longest interval tells the cycle."""

    def __init__(self, cycle: int, rank: int, now_s: float, chance: random.Random) -> None:
        self._cycle = cycle
        self._rank = rank
        self._from_s = now_s
        self._chance = chance
        self._saves = self._steps = 0
        self._has_ended = False

    def milestones(self, left_s: float) -> Iterator[tuple[float, dict[str, int]]]:
        """Yield what it reaches, each with the seconds until then."""
        at_s, saves = 0.0, 0
        for steps in (10, 32, 64, 128):
            at_s += self._chance.uniform(0.05, 1.0)
            yield at_s, {"steps": steps}
        at_s = 0.0
        while (at_s := at_s + self._chance.uniform(0.2, 3.0)) < left_s:
            saves += 1
            yield at_s, {"saves": saves}
        yield max(0.0, left_s - self._chance.uniform(0.0, 0.3)), {"ended": 1}

    def reaches(self, *, saves: int = 0, steps: int = 0, ended: int = 0) -> None:
        """It has reached a milestone."""
        self._saves, self._steps = max(self._saves, saves), max(self._steps, steps)
        self._has_ended |= bool(ended)

    def intervals(self, now_s: float) -> Intervals:
        """What its monitor reports."""
        seen = Observed(1 + int(20.0 * (now_s - self._from_s)), longest_s(self._cycle), self._rank)
        return Intervals(self._cycle, self._saves, self._steps, self._has_ended, _FACTS, dict.fromkeys(_SECTIONS, seen))


def longest_s(cycle: int) -> float:
    """Longest interval of all ranks of that cycle."""
    return 1.0 + cycle


@dataclass
class Learning:
    """What happened. ``document``: the file's."""

    document: Mapping[str, Any] | None = None
    results: list[tuple[float, str, Intervals]] = field(default_factory=list)
    """When, by which coordinator, and what all nodes together have seen."""
    counts: Counter[type] = field(default_factory=Counter)
    """By kind, how many messages were sent. ``bytes``: how long they were."""
    bytes: Counter[type] = field(default_factory=Counter)

    @property
    def messages(self) -> int:
        """How many there were."""
        return self.counts.total()

    def sent(self, message: Any, links: int = 1) -> None:
        """A message was sent, on so many connections."""
        if isinstance(message, Intervals | Killed):
            self.counts[type(message)] += links
            self.bytes[type(message)] += links * len(encode(message))

    def coordinator_sends(self, name: str, now_s: float, send: actions.Send) -> None:
        """A coordinator has sent something."""
        self.sent(send.message, len(send.links))
        if isinstance(send.message, Intervals):
            self.results.append((now_s, name, send.message))


def learning(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Check all of it."""
    if not plan.learns and job.learning.messages:
        yield f"{job.learning.messages} messages of learning in a job without milestones"
    ends = [(name, found.cycle) for _, name, found in job.learning.results if found.ended]
    yield from (f"two ends of the run {each}" for each in sorted(set(ends)) if ends.count(each) > 1)
    for at_s, name, found in job.learning.results:
        seen = {each.longest_s for each in found.seen.values()}
        if not seen <= {longest_s(found.cycle)}:
            yield f"{name} has seen {seen} in cycle {found.cycle} at {at_s:.1f} s"
    for launcher in job.launchers:
        for cycle, arm in launcher.armed.items():
            steps = [timeout_s for name, timeout_s in arm.timeouts.items() if name == "step"]
            # five times the longest interval so far, averaged, at most doubled in each cycle
            if any(not 60.0 <= step <= 60.0 * 2.0 ** (cycle + 1) for step in steps):
                yield f"{launcher.name} has armed {steps} in cycle {cycle}"
