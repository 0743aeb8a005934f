"""Machines of launchers and of a coordinator, without sockets: what is sent arrives at once, time is virtual."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Assignment, DecisionRecord
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.restart_policy import NodeState, Reached
from megatron_ft.link.facts.launcher import Cause, CauseKind

__all__ = ["Job", "Launcher"]

_STEP_S = 0.05


@dataclass(eq=False)
class Launcher:
    """One node. ``is_quick``: it is ready for the next cycle as soon as it is to end its ranks."""

    job: Job
    name: str
    member: Member
    is_quick: bool = True
    is_silent: bool = False
    """It answers nothing, and its connection stays."""
    progress: Callable[[float], int | None] = lambda _now_s: None
    """Count of the steps that its ranks have made by a time."""
    link: int | None = None
    lines: list[str] = field(default_factory=list)
    """That it was told."""
    printed: list[str] = field(default_factory=list)
    """Those of them that no other launcher prints."""
    prints: bool | None = None
    """It prints the lines of the job, as far as it was told."""
    begun: Assignment | None = None
    ends: list[m.End] = field(default_factory=list)
    verdicts: list[m.Verdict] = field(default_factory=list)
    left: tuple[int, str] | None = None

    @property
    def stays(self) -> bool:
        """The others go on without its node, and it waits for the end."""
        return self.member.standing.phase is m.NodePhase.EXCLUDED

    @property
    def place(self) -> int | None:
        """Of its node, by the last decision."""
        return None if self.member.decided is None else self.member.decided.place

    @property
    def cycle(self) -> int | None:
        """That runs here, or did last."""
        return None if self.begun is None else self.begun.decision.cycle

    def do(self, effects: list[actions.MemberEffect]) -> None:
        """What its machine asks for."""
        for effect in effects:
            match effect:
                case actions.Connect(address):
                    self.job.break_off(self)
                    if address:
                        self.job.connect(self)
                case actions.Transmit(message):
                    self.job.to_coordinator(self, message)
                case actions.OpenStore():
                    self.do(self.member.store_opened(f"{self.name}:store", self.job.now_s))
                case Assignment(place=place):
                    self.begun, self.prints = self.begun if place is None else effect, place == 0
                case m.End():
                    self.ends.append(effect)
                    if self.is_quick:
                        self.ready()
                case m.Verdict() | m.Tell():
                    self._hears(effect)
                case m.Dismiss(code, text, printer=printer):
                    self.left, self.prints = (code, text), printer == self.member.identity.instance
                    self.job.break_off(self)

    def _hears(self, effect: m.Verdict | m.Tell) -> None:
        self.prints = effect.printer == self.member.identity.instance if effect.printer else self.prints
        match effect:
            case m.Verdict():
                self.verdicts.append(effect)
            case m.Tell(text, printer):
                self.lines.append(text)
                self.printed += [text] if printer in ("", self.member.identity.instance) else []

    def tell(self, message: Any) -> None:
        """Its node has something to say."""
        self.do(self.member.tell(message, self.job.now_s))

    def ready(self) -> None:
        """None of its ranks is left."""
        self.tell(m.Ready())

    def report(self, state: NodeState, text: str = "", reached: Reached | None = None, **more: Any) -> None:
        """Of its ranks in the cycle that runs."""
        assert self.cycle is not None
        self.tell(m.Report(self.cycle, state, Cause(text=text, **more), reached))

    def fails(self, text: str = "rank 0 exited with code 7", **more: Any) -> None:
        """One of its ranks does."""
        self.report(NodeState.UNHEALTHY, text, kind=CauseKind.CRASH, rank=0, **more)

    def finishes(self) -> None:
        """All its ranks do."""
        self.report(NodeState.SUCCEEDED)

    def leaves(self, text: str, **more: Any) -> None:
        """It says farewell."""
        self.tell(m.Goodbye(text, **more))

    def dies(self) -> None:
        """It is killed."""
        self.job.launchers.remove(self)
        self.job.break_off(self)


class Job:
    """All of them. ``said`` is what the coordinator's machine has decided and judged."""

    def __init__(self, *, owner: str = "a", **rules: Any) -> None:
        self.rules = m.Rules(**{"min_nodes": 2, "max_nodes": 3, "max_restarts": 3, "node_lost_s": 5.0, **rules})
        self.now_s = 0.0
        self.coordinator = Coordinator("c", m.JobDefinition("job", self.rules), now_s=0.0, parts=LEADER_PARTS)
        self.launchers: list[Launcher] = []
        self.decided: list[DecisionRecord] = []
        self.has_quit = False
        self._owner = owner
        self._links: dict[int, Launcher] = {}
        self._count = 0
        self._queue: deque[Callable[[], None]] = deque()

    def start(
        self,
        names: str,
        *,
        rank: int | None = None,
        domain: str = "",
        ago_s: float = 0.0,
        name: str = "job",
        names_life: bool = False,
    ) -> list[Launcher]:
        """Launchers on the hosts of these names, one letter each, that are ready at once, one after the other.

        They come so many seconds after their start; ``name`` is the job's.
        """
        started = []
        for host in names:
            self._count += 1
            who = m.Identity(
                name,
                self.rules,
                f"i{self._count}",
                host,
                host,
                rank,
                endpoint="c:1",
                domain=domain,
                started_s=self.now_s - ago_s,
                names_life=names_life,
            )
            member = Member(who, now_s=self.now_s, chance=random.Random(self._count))
            member.owns = host == self._owner
            launcher = Launcher(self, host, member)
            self.launchers.append(launcher)
            started.append(launcher)
            launcher.do(member.tick(self.now_s))
            launcher.ready()
            self.run()
        return started

    def run(self, seconds: float = 0.0) -> None:
        """Deliver what is under way, and let time pass."""
        self._settle()
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + _STEP_S)
            for launcher in list(self.launchers):
                if self.now_s >= launcher.member.alarm_s and launcher.left is None and not launcher.is_silent:
                    launcher.do(launcher.member.tick(self.now_s, launcher.progress(self.now_s)))
            self._settle()

    def take_over(self) -> None:
        """The leader dies, and the next one is given the record of its last decision."""
        record, defined = self.decided[-1], m.JobDefinition("job", self.rules)
        self.coordinator = Coordinator("d", defined, record=record, now_s=self.now_s, parts=LEADER_PARTS)

    def connect(self, launcher: Launcher) -> None:
        """To the only coordinator."""
        self.break_off(launcher)
        if self.has_quit:
            self._queue.append(lambda: launcher.do(launcher.member.broken(self.now_s)))
            return
        self._count += 1
        launcher.link = self._count
        self._links[self._count] = launcher
        self._queue.append(lambda: launcher.do(launcher.member.opened(self.now_s)))

    def break_off(self, launcher: Launcher, *, silent: bool = False) -> None:
        """Its connection ends. ``silent``: its host answers no packet any more."""
        if launcher.link is not None:
            link, launcher.link = launcher.link, None
            del self._links[link]
            self._queue.append(lambda: self._coordinate(self.coordinator.broken(link, self.now_s, silent=silent)))

    def to_coordinator(self, launcher: Launcher, message: Any) -> None:
        """A message of a launcher's."""
        link = launcher.link
        if link is not None and not launcher.is_silent:
            self._queue.append(lambda: self._coordinate(self.coordinator.heard(link, message, self.now_s)))

    def _settle(self) -> None:
        while True:
            while self._queue:
                self._queue.popleft()()
            if not self.coordinator.needs_settling and self.now_s < self.coordinator.alarm_s:
                return
            self._coordinate(self.coordinator.settle(self.now_s))
            if not self._queue and not self.coordinator.needs_settling:
                return

    def _coordinate(self, effects: list[actions.CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case actions.Send(links, message):
                    for link in links:
                        self._queue.append(lambda link=link, message=message: self._deliver(link, message))
                case actions.Drop(link):
                    launcher = self._links.pop(link, None)
                    if launcher is not None:
                        launcher.link = None
                        self._queue.append(lambda each=launcher: each.do(each.member.broken(self.now_s)))
                case DecisionRecord():
                    self.decided.append(effect)
                case actions.Quit():
                    self.has_quit = True

    def _deliver(self, link: int, message: Any) -> None:
        launcher = self._links.get(link)
        if launcher is not None and not launcher.is_silent:
            launcher.do(launcher.member.heard(message, self.now_s))
