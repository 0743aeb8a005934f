"""A launcher that is ready opens a store for the ranks, which may take its time, and serves all else meanwhile."""

from __future__ import annotations

import random
import threading
import time

import pytest

from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind
from megatron_ft.job.rules.member import Member
from megatron_ft.launcher.coordination.rank_store import RankStoreError
from megatron_ft.link.reactor import Reactor
from tests.support.coordination import BOUND_S, coordination, until

RULES = m.Rules(min_nodes=2, max_nodes=2, max_restarts=3)


class Node:
    """A launcher, and the messages that it sends."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.opened = self.closed = 0
        self.go = threading.Event()
        self.error: Exception | None = None
        who = m.Identity("job", RULES, "i", "host", "host", endpoint="host:1")
        member = Member(who, now_s=time.monotonic(), chance=random.Random(1))
        self.coordination = coordination(reactor, member, open_store=self.open, close_store=self.close)
        self.sent: list[m.FromMember] = []
        self.coordination.transmit = self.sent.append  # type: ignore[method-assign]
        self.coordination.connect = lambda _address: None  # type: ignore[method-assign]
        self.coordination._opened()
        self.coordination._heard(m.Admitted())

    def open(self) -> str:
        self.opened += 1
        assert self.go.wait(BOUND_S)
        if self.error is not None:
            raise self.error
        return f"host:{self.opened}"

    def close(self) -> None:
        self.closed += 1

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


def test_each_round_has_a_store_of_its_own(reactor: Reactor) -> None:
    node = Node(reactor)
    node.is_ready()
    node.is_ready()  # while the first one is being opened
    node.go.set()
    until(reactor, node.told)
    assert node.told() == [m.Ready(store="host:2")]


@pytest.mark.parametrize("place", [0, 1])
def test_store_is_closed_when_the_cycle_meets_at_that_of_another_node(reactor: Reactor, place: int) -> None:
    node = Node(reactor)
    node.go.set()
    node.is_ready()
    until(reactor, node.told)
    node.coordination._heard(Assignment(Decision(0, "c.1", DecisionKind.START, 0, 2), place, "host:1"))
    assert node.closed == (place != 0)


def test_store_that_cannot_be_opened_is_an_error_of_the_loop(reactor: Reactor) -> None:
    node = Node(reactor)
    node.error = RankStoreError("the port isn't free")
    node.is_ready()
    node.go.set()
    with pytest.raises(RankStoreError, match="isn't free"):
        until(reactor, node.told)
    assert node.told() == []


def test_store_error_is_ignored_once_the_launcher_has_left(reactor: Reactor) -> None:
    node = Node(reactor)
    node.error = RankStoreError("the port isn't free")
    node.is_ready()
    node.coordination._heard(m.Dismiss(0))
    node.go.set()
    until(reactor, lambda: node.coordination._stores_wanted == 0)
    assert node.told() == []
