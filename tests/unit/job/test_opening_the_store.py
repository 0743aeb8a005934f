"""A launcher that is ready opens a store for the ranks, which may take its time, and serves all else meanwhile."""

from __future__ import annotations

import random
import threading
import time

from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.member import Member
from megatron_ft.link.reactor import Reactor
from tests.support.coordination import BOUND_S, coordination, until

RULES = m.Rules(min_nodes=2, max_nodes=2, max_restarts=3)


class Node:
    """A launcher, and the messages that it sends."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.go = threading.Event()
        who = m.Identity("job", RULES, "i", "host", "host", endpoint="host:1")
        member = Member(who, now_s=time.monotonic(), chance=random.Random(1))
        self.coordination = coordination(reactor, member, open_store=self.open, close_store=lambda: None)
        self.sent: list[m.FromMember] = []
        self.coordination.transmit = self.sent.append  # type: ignore[method-assign]
        self.coordination.connect = lambda _address="": None  # type: ignore[method-assign]
        self.coordination._opened()
        self.coordination._heard(m.Admitted())

    def open(self) -> str:
        assert self.go.wait(BOUND_S)
        return "host:1"

    def is_ready(self) -> None:
        self.coordination.tell(m.Ready())

    def told(self) -> list[m.Ready]:
        return [message for message in self.sent if isinstance(message, m.Ready)]


def test_the_loop_is_served_while_a_name_server_is_silent(reactor: Reactor) -> None:
    node = Node(reactor)
    begun_s = time.monotonic()
    node.is_ready()
    served: list[str] = []
    reactor.call_later(0.0, lambda: served.append("timer"))
    until(reactor, lambda: served)
    assert time.monotonic() - begun_s < BOUND_S / 2
    assert node.told() == []
    node.go.set()
    until(reactor, node.told)
    assert node.told() == [m.Ready(store="host:1")]
