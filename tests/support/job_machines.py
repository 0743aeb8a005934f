"""The control plane's machines, without sockets: values that tests give them, and how launchers answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Decision, DecisionKind, DecisionRecord
from megatron_ft.job.rules.member import Member
from megatron_ft.job.rules.nodes import Node
from megatron_ft.link.base.codec import NO_PARTS, Parts
from megatron_ft.memory.rules.snapshots import Kept

__all__ = ["RULES", "answers", "begun", "decision", "led", "links", "member", "node", "sent", "unled"]

RULES = m.Rules(min_nodes=2, max_nodes=4, max_restarts=3, node_lost_s=5.0)


def decision(number: int = 0, kind: DecisionKind = DecisionKind.START, *, cycle: int = 0, size: int = 4) -> Decision:
    """One of ``size`` nodes."""
    return Decision(number, f"c{number}", kind, cycle, size)


def member(rules: m.Rules = RULES, **more: Any) -> Member:
    """A launcher's."""
    who = m.Identity("job", rules, "me", "host", "host", endpoint="first:1", **more)
    return Member(who, now_s=0.0, chance=random.Random(1))


def led(machine: Member) -> Member:
    """It has found a leader."""
    machine.tick(0.0)
    machine.opened(0.0)
    machine.heard(m.Admitted(), 0.0)
    return machine


def unled(
    machine: Member, now_s: float, progress: Callable[[float], int | None] = lambda _now_s: None, problem: str = ""
) -> Iterator[tuple[float, actions.MemberEffect]]:
    """Let a launcher that reaches no leader go on until it leaves; what it does, and when."""
    is_over = False
    while not is_over:
        effects = machine.tick(now_s, progress(now_s))
        if any(isinstance(effect, actions.Connect) and effect.address for effect in effects):
            effects += machine.broken(now_s, problem)
        yield from ((now_s, effect) for effect in effects)
        is_over = any(isinstance(effect, m.Dismiss) for effect in effects)
        now_s = max(now_s, machine.alarm_s) + 0.001


def answers(
    machine: Coordinator, effects: list[actions.CoordinatorEffect], now_s: float = 0.0
) -> list[actions.CoordinatorEffect]:
    """Answer the leader's questions as launchers do, until there are none; all effects."""
    found, new = list(effects), effects
    while True:
        asked = [each for each in new if isinstance(each, actions.Send) and isinstance(each.message, m.Beat)]
        said = [(link, each.message) for each in asked for link in each.links if each.message.number]
        if not said:
            return found
        new = [effect for link, beat in said for effect in machine.heard(link, beat, now_s)] + machine.settle(now_s)
        found += new


def node(name: str, host: str = "", *, arrived: int = 0, **more: Any) -> Node:
    """A launcher that has come, and isn't connected. ``more``: of its hello."""
    return Node(name, host or name, m.Hello("job", RULES, name, host or name, **more), arrived)


def sent(effects: Sequence[actions.CoordinatorEffect], kind: type) -> list[Any]:
    """What is sent of that kind."""
    return [each.message for each in effects if isinstance(each, actions.Send) and isinstance(each.message, kind)]


def links(effects: list[actions.CoordinatorEffect], kind: type) -> list[int]:
    """Who is sent such a message."""
    sent = [effect for effect in effects if isinstance(effect, actions.Send) and isinstance(effect.message, kind)]
    return sorted(link for effect in sent for link in effect.links)


def begun(rules: m.Rules, names: Sequence[str], stock: Sequence[Kept] = ()) -> Coordinator:
    """Cycle 0 runs, on these nodes; the connection of each is its number. ``stock``: what each can restore."""
    rules = replace(rules, max_nodes=len(names))
    machine = Coordinator("c", m.JobDefinition("job", rules), now_s=0.0, parts=LEADER_PARTS)
    for link, name in enumerate(names):
        machine.heard(link, m.Hello("job", rules, name, name, name, owns=link == 0), 0.0)
        machine.heard(link, m.Ready(Parts(stock[link]) if stock else NO_PARTS, f"{name}:1"), 0.0)
    assert any(isinstance(effect, DecisionRecord) for effect in answers(machine, machine.settle(0.0)))
    return machine
