"""The control plane's machines, without sockets: values that tests give them, and how launchers answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.job import actions
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.decisions import Decision, DecisionKind
from megatron_ft.core.job.member import Member
from megatron_ft.core.memory.snapshots import Kept

__all__ = ["RULES", "answers", "begun", "decision", "led", "links", "member"]

RULES = m.Rules(min_nodes=2, max_nodes=4, max_restarts=3)


def decision(
    number: int = 0, kind: DecisionKind = DecisionKind.CYCLE, *, cycle: int = 0, size: int = 4, head: int = 0
) -> Decision:
    """One of ``size`` nodes."""
    return Decision(number, (number, "c", 1), kind, cycle, size, size, head)


def member(**more: Any) -> Member:
    """A launcher's, at "host:1"."""
    who = m.Identity("job", RULES, "me", "host", "host:1", ("first:1", "second:1"), **more)
    return Member(who, now_s=0.0, chance=random.Random(1))


def led(machine: Member, term: tuple[int, str] = (1, "c")) -> Member:
    """It has found a coordinator."""
    machine.tick(0.0)
    machine.opened(0.0)
    machine.heard(m.Lead(term), 0.0)
    return machine


def answers(machine: Coordinator, effects: list[actions.CoordinatorEffect]) -> list[actions.CoordinatorEffect]:
    """Take part as launchers do, until there is nothing to say; what was asked for at last."""
    while True:
        said: list[actions.Heard] = []
        for effect in effects:
            if isinstance(effect, actions.Send) and isinstance(effect.message, m.Lead):
                said += [actions.Heard(link, m.Follow(effect.message.term)) for link in effect.links]
            elif isinstance(effect, actions.Send) and isinstance(effect.message, m.Propose):
                said += [actions.Heard(link, m.Accept(effect.message.ballot, "store:1")) for link in effect.links]
        if not said:
            return effects
        effects = [effect for event in said for effect in machine.handle(event, 0.0)] + machine.settle(0.0)


def links(effects: list[actions.CoordinatorEffect], kind: type) -> list[int]:
    """Who is sent such a message."""
    sent = [effect for effect in effects if isinstance(effect, actions.Send) and isinstance(effect.message, kind)]
    return sorted(link for effect in sent for link in effect.links)


def begun(rules: m.Rules, names: str, stock: Sequence[Kept] = ()) -> Coordinator:
    """Cycle 0 runs, on these nodes; the connection of each is its number. ``stock``: what each can restore."""
    machine = Coordinator("c", founds=True, now_s=0.0)
    for link, name in enumerate(names):
        machine.handle(actions.Heard(link, m.Hello("job", rules, name, 1, name, owns=link == 0)), 0.0)
        machine.handle(actions.Heard(link, m.Ready(stock[link] if stock else Kept())), 0.0)
    assert any(isinstance(effect, actions.Decided) for effect in answers(machine, machine.settle(0.0)))
    return machine
