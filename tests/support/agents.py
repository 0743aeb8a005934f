"""The launcher's machine, without a launcher: events are told, time is virtual, and what it asks for is kept."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from megatron_ft.config.config import ConfigValues
from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.job.rules.messages import Tell
from megatron_ft.job.rules.restart_policy import Action, Outcome, RestartDecision
from megatron_ft.launcher.cycle.parts import launcher_parts
from megatron_ft.launcher.rules import events
from megatron_ft.launcher.rules.agent import Agent
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Options
from megatron_ft.link.base.codec import name_of
from megatron_ft.link.base.layout import BoardSnapshot, CollectiveCounts
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.facts.launcher import Cause, CauseKind, RankExited, RankStarted
from megatron_ft.link.facts.monitor import Attached, Detached, FirstStep, Signalled
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages.monitor_messages import Observation, RankOrder, Suspect
from megatron_ft.memory.rules.snapshots import Kept

T = TypeVar("T")
START_NS = 1_000_000_000_000


def held(cycle: int = 0, *, place: int = 0, nodes: int = 1, restarts: int = 0) -> Assignment:
    """A cycle that begins."""
    decision = Decision(cycle, f"c{cycle}", DecisionKind.START, cycle, nodes, restarts=restarts)
    return Assignment(decision, place, store="here:1")


def verdict(
    cycle: int = 0,
    outcome: Outcome = Outcome.FAILED,
    action: Action = Action.RESTART,
    text: str = "",
    *,
    kind: CauseKind = CauseKind.MEMBERSHIP,
    name: str = "",
    rank: int | None = None,
    iteration: int | None = None,
    restarts_left: int = 2,
    reason: str = "",
    no_progress: bool = False,
    **more: Any,
) -> m.Verdict:
    """Why that cycle has ended."""
    cause = Cause(kind=kind, text=text, rank=rank, iteration=iteration, host=name)
    decision = RestartDecision(action=action, restarts_left=restarts_left, reason=reason, no_progress=no_progress)
    return m.Verdict(cycle=cycle, outcome=outcome, cause=cause, decision=decision, **more)


def attached(
    local_rank: int,
    cycle: int,
    at_ns: int | None,
    user_code_ns: int | None = None,
    has_group: bool = False,
    **more: Any,
) -> events.MonitorReport:
    """A rank is watched."""
    facts = {"user_code_ns": user_code_ns, "has_group": has_group, **more}
    return events.MonitorReport(local_rank, Attached(rank=10 * local_rank, cycle=cycle, pid=100, at_ns=at_ns, **facts))


def detached(local_rank: int, cycle: int, at_ns: int) -> events.MonitorReport:
    """A rank has ended its monitoring."""
    return events.MonitorReport(local_rank, Detached(rank=10 * local_rank, cycle=cycle, at_ns=at_ns))


def trains(local_rank: int, cycle: int, began_ns: int, at_ns: int) -> events.MonitorReport:
    """A rank is through its first step."""
    step = FirstStep(rank=10 * local_rank, cycle=cycle, began_ns=began_ns, at_ns=at_ns)
    return events.MonitorReport(local_rank, step)


def hung(**changes: Any) -> RankHung:
    """Rank 0 is late in a step."""
    facts = {"cycle": 0, "rank": 0, "kind": "section", "section": "step", "iteration": 7, "at_ns": 0, "since_ns": 0}
    return RankHung(**{**facts, "elapsed_s": 2.0, "timeout_s": 1.0, **changes})


HANG = hung(elapsed_s=3.0, timeout_s=3.0, at_ns=START_NS)


def found_hung(local_rank: int, cycle: int, verdict: RankHung, *, observed_only: bool = False) -> events.MonitorReport:
    """A monitor has found its rank hung."""
    return events.MonitorReport(local_rank, replace(verdict, cycle=cycle, observed_only=observed_only))


def suspected(local_rank: int, cycle: int, verdict: RankHung) -> events.MonitorReport:
    """A monitor asks whether any rank makes progress."""
    return events.MonitorReport(local_rank, Suspect(replace(verdict, cycle=cycle)))


def observed(local_rank: int, cycle: int, note: RankSnapshot) -> events.MonitorReport:
    """A monitor has collected evidence on its rank."""
    return events.MonitorReport(local_rank, Observation(cycle, note))


def signalled(local_rank: int, number: int) -> events.MonitorReport:
    """A monitor has sent its rank a signal."""
    name = signal.Signals(number).name
    return events.MonitorReport(local_rank, Signalled(rank=10 * local_rank, cycle=0, signal=name))


class Driven:
    """One agent. ``boards``, ``words``, ``stopped``, ``collectives`` and such are what it sees, by local rank."""

    def __init__(self, found: Kept = Kept(), **options: object) -> None:  # noqa: B008 - frozen
        self.pauses = Pauses()
        learning = cast("ConfigValues", options.pop("learning", ConfigValues()))
        own = {each.name: options.pop(each.name) for each in fields(Options) if each.name in options}
        values = ConfigValues.from_dict({"watch_collectives": "off", **learning.to_dict(), **options})
        given = Options(given=values, **own)  # type: ignore[arg-type]
        self.parts = launcher_parts(given, self.pauses, found)
        self.agent = Agent(given, self.parts)
        self.now_ns = START_NS
        self.done: list[events.Effect] = []
        self.boards: dict[int, BoardSnapshot | None] = defaultdict(lambda: None)
        self.words: dict[int, CrashOutput] = defaultdict(CrashOutput)
        self.stopped: dict[int, bool] = defaultdict(bool)
        self.run_delays_ns: dict[int, Mapping[int, int]] = defaultdict(dict)
        self.collectives: dict[int, CollectiveCounts | None] = defaultdict(lambda: None)
        self.is_finished = False

    @property
    def record(self) -> NodeCycle:
        """Of its cycle."""
        return self.agent.cycle

    def hear(self, *told: events.Event) -> list[events.Effect]:
        """Tell it these; what it asks for then."""
        asked: list[events.Effect] = []
        for event in told:
            seen = events.Readings(
                self.boards,
                self.words,
                self.stopped,
                self.run_delays_ns,
                collectives=self.collectives,
                is_finished=lambda: self.is_finished,
            )
            asked += self.agent.handle(event, self.now_ns, seen)
            alarm_ns = self.agent.alarm_ns
            # it would ring for ever
            assert not isinstance(event, events.Tick) or alarm_ns is None or alarm_ns > self.now_ns, alarm_ns
        self.done += asked
        return asked

    def wait(self, seconds: float, *, late: bool = False) -> list[events.Effect]:
        """Let time pass, with all its alarms; ``late``: they come when all that time is over."""
        asked: list[events.Effect] = []
        until_ns = self.now_ns + round(seconds * 1e9)
        while (alarm_ns := self.agent.alarm_ns) is not None and alarm_ns <= until_ns:
            self.now_ns = until_ns if late else max(self.now_ns, alarm_ns)
            asked += self.hear(events.Tick())
        self.now_ns = until_ns
        return asked

    def run(
        self, ranks: int = 2, cycle: int = 0, *, nodes: int = 1, place: int = 0, restarts: int = 0
    ) -> list[events.Effect]:
        """A cycle begins, and its ranks are started: local rank n is rank 10 n, and process 100 + n."""
        met = events.RanksMet([10 * local_rank for local_rank in range(ranks)], place, nodes, ranks * nodes)
        asked = self.hear(events.Tick(), held(cycle, place=place, nodes=nodes, restarts=restarts), met)
        for local_rank in range(ranks):
            asked += self.hear(
                RankStarted(rank=10 * local_rank, local_rank=local_rank, pid=100 + local_rank, at_ns=self.now_ns)
            )
        return asked + self.hear(events.RanksStarted())

    def exits(
        self, local_rank: int, code: int = 0, *, sent: tuple[int, ...] = (), signalled_at_ns: int = 0
    ) -> list[events.Effect]:
        """A rank ends."""
        event = RankExited(
            rank=self.record.ranks[local_rank],
            cycle=self.record.cycle,
            local_rank=local_rank,
            pid=100 + local_rank,
            exitcode=code,
            at_ns=self.now_ns,
            signals_sent=sent,
            signalled_at_ns=signalled_at_ns,
        )
        return self.hear(event)

    def ends(
        self, outcome: Outcome = Outcome.FAILED, *, restarts: bool = True, lost: bool = False, text: str = ""
    ) -> list[events.Effect]:
        """The coordinator ends the cycle."""
        return self.hear(m.End(self.agent.cycle.cycle, outcome, restarts, lost, text))

    def stop(self, number: signal.Signals = signal.SIGTERM, *, again: bool = False) -> list[events.Effect]:
        """The launcher is asked to stop."""
        return self.hear(events.StopAsked(number, again))

    def all_of(self, kind: type[T]) -> list[T]:
        """What it has asked for so far of this kind."""
        return [effect for effect in self.done if isinstance(effect, kind)]

    def orders(self, *kinds: type[RankOrder]) -> list[events.OrderMonitor]:
        """What it has ordered monitors to do, of these kinds."""
        return [effect for effect in self.all_of(events.OrderMonitor) if isinstance(effect.order, kinds)]

    @property
    def said(self) -> list[str]:
        """Its lines."""
        return [effect.text for effect in self.all_of(Tell)]

    @property
    def told(self) -> list[m.NodeMessage]:
        """What the coordinator has heard."""
        return [effect for effect in self.done if isinstance(effect, m.NodeMessage)]

    @property
    def written(self) -> list[str]:
        """The kinds of its records."""
        return [name_of(type(effect.record)) for effect in self.all_of(events.Write)]
