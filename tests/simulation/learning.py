"""Learned timeouts in a simulated job: what toy ranks report, and what has to be true of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ft.core.job import edge
from megatron_ft.core.timeouts.exchange import Facts, Intervals, Learned, Milestone, Moment, Raised, Survey
from megatron_ft.core.timeouts.learned import LearnedState
from megatron_ft.core.timeouts.sketch import MOST_BUCKETS, Sketch
from megatron_ft.ipc.wire import encode

if TYPE_CHECKING:
    from tests.simulation.job import Job, Launcher
    from tests.simulation.plan import Plan

__all__ = ["STATE_PATH", "Kill", "Learning", "ToyRank", "learning"]

STATE_PATH = "/ft_state.json"
_LOST_S = 1.0
"""A kill may be forgotten if its launcher or a coordinator ended so soon before or after it."""
_TOLD_AGAIN = {"rank_hangs", "connection_reset"}
"""What the kill itself is due to, and what a launcher is back from that is told what it has missed."""
_SECTIONS = ("setup", "step", "checkpointing", "out_of_section")


class ToyRank:
    """One rank of a cycle. The length of its longest interval tells the cycle."""

    def __init__(self, cycle: int, rank: int, now_s: float, chance: random.Random) -> None:
        self._cycle = cycle
        self._rank = rank
        self._from_s = now_s
        self._chance = chance

    def milestones(self, left_s: float) -> Iterator[tuple[float, Milestone]]:
        """Yield what it reaches, each with the seconds until then."""
        at_s, saves = 0.0, 0
        for count in (10, 32, 64, 128):
            at_s += self._chance.uniform(0.05, 1.0)
            yield at_s, Milestone(self._cycle, Moment.STEPS, count)
        at_s = 0.0
        while (at_s := at_s + self._chance.uniform(0.2, 3.0)) < left_s:
            saves += 1
            yield at_s, Milestone(self._cycle, Moment.SAVE, saves)
        yield max(0.0, left_s - self._chance.uniform(0.0, 0.3)), Milestone(self._cycle, Moment.END)

    def intervals(self, survey: Survey, now_s: float) -> Intervals:
        """Answer a survey."""
        ended = 1 + int(20.0 * (now_s - self._from_s))
        tail = tuple((40 + 3 * bucket, float(ended + 1000 * bucket)) for bucket in range(MOST_BUCKETS))
        sketch = Sketch(
            ended=100_000 + ended,
            longest_s=longest_s(self._cycle),
            rank=self._rank,
            first_s=12.3456,
            explained_s=345.678,
            open_s=0.1234,
            tail=tail,
        )
        facts = Facts(learns=True, has_hooks=True, loaded=True, enough_steps=True, saved=True)
        return Intervals(survey.cycle, survey.number, dict.fromkeys(_SECTIONS, sketch), facts)


def longest_s(cycle: int) -> float:
    """Longest interval of all ranks of that cycle."""
    return 1.0 + cycle


@dataclass(frozen=True)
class Kill:
    """A launcher has told that a learned timeout had ended a rank."""

    at_s: float
    launcher: Launcher
    raised: Raised


@dataclass
class Learning:
    """What happened. ``state`` is the file."""

    state: LearnedState | None = None
    learned: list[tuple[float, str, Learned]] = field(default_factory=list)
    """When, by which coordinator, and what."""
    kills: list[Kill] = field(default_factory=list)

    counts: Counter[type] = field(default_factory=Counter)
    """By kind, how many messages were sent. ``bytes``: how long they were."""
    bytes: Counter[type] = field(default_factory=Counter)

    @property
    def messages(self) -> int:
        """How many there were."""
        return self.counts.total()

    def sent(self, message: Any, links: int = 1) -> None:
        """A message was sent, on so many connections."""
        if isinstance(message, Milestone | Intervals | Raised | Survey | Learned):
            self.counts[type(message)] += links
            self.bytes[type(message)] += links * len(encode(message))

    def coordinator_sends(self, name: str, now_s: float, send: edge.Send) -> None:
        """A coordinator has sent something."""
        self.sent(send.message, len(send.links))
        if isinstance(send.message, Learned):
            self.learned.append((now_s, name, send.message))


def learning(plan: Plan, job: Job, trouble: Any) -> Iterator[str]:
    """Check all of it."""
    if not plan.learns and job.learning.messages:
        yield f"{job.learning.messages} messages of learning in a job without milestones"
    surveys = [(name, found.number) for _, name, found in job.learning.learned]
    yield from (f"two results of survey {each}" for each in sorted(set(surveys)) if surveys.count(each) > 1)
    for at_s, name, found in job.learning.learned:
        seen = {each.max_observed_s for each in found.timeouts.values()}
        if not seen <= {longest_s(found.cycle)}:
            yield f"{name} learned {seen} in cycle {found.cycle} at {at_s:.1f} s"
    yield from _kills(job, trouble)


def _kills(job: Job, trouble: Any) -> Iterator[str]:
    """A kill raises the timeout on all nodes that train in its cycle, and take part in the next one."""
    for kill in job.learning.kills:
        if _may_be_lost(job, kill) or trouble.network:
            continue
        cycle = kill.raised.cycle
        for launcher in {each.launcher for each in job.trained if each.cycle == cycle and each.from_s <= kill.at_s}:
            arm = launcher.armed.get(cycle + 1)
            is_back = any(each.launcher is launcher and each.cycle == cycle + 1 for each in job.trained)
            if (
                is_back
                and not _was_hurt(launcher, kill)
                and (arm is None or arm.raised.get(kill.raised.name, 1.0) < 2.0)
            ):
                yield f"{launcher.name} has forgotten in cycle {cycle + 1} what {kill.launcher.name} told of {cycle}"


def _may_be_lost(job: Job, kill: Kill) -> bool:
    ends = [kill.launcher.ended_s, *(process.ended_s for process in job.coordinators)]
    is_close = any(at_s is not None and abs(at_s - kill.at_s) <= _LOST_S for at_s in ends)
    return is_close or _was_hurt(kill.launcher, kill)


def _was_hurt(launcher: Launcher, kill: Kill) -> bool:
    """Return True if something kept the launcher from hearing or telling of the kill."""
    hurts = [hurt for hurt in launcher.hurts if hurt.fault.kind not in _TOLD_AGAIN]
    return any(hurt.from_s - 5.0 <= kill.at_s <= hurt.until_s + 5.0 for hurt in hurts)
