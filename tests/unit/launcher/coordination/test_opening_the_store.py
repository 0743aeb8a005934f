"""The launcher at place 0 opens the store of the ranks, which may take its time, and serves all else meanwhile."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest

from megatron_ft.core.job import messages as m
from megatron_ft.core.job.decisions import Ballot, Decision, DecisionKind
from megatron_ft.launcher.coordination.coordination import Coordination
from megatron_ft.launcher.coordination.rank_store import RankStoreError
from megatron_ft.link.reactor import Reactor
from tests.support.coordination import BOUND_S, until
from tests.support.reactors import reactor

__all__ = ["reactor"]

RULES = m.Rules(min_nodes=2, max_nodes=2, max_restarts=3)


def cycle(number: int) -> Decision:
    return Decision(0, (0, "c", number), DecisionKind.CYCLE, 0, 2, 2, 0)


class Node:
    """The launcher at place 0, and the messages that it sends."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.opened = 0
        self.go = threading.Event()
        self.error: Exception | None = None
        self.transport = mock.Mock()
        self.coordination = Coordination(
            m.Identity("job", RULES, "i", "host", "host:1", ("host:1",)),
            transport=lambda _listener: self.transport,
            open_store=self.open,
            reactor=reactor,
            say=lambda _text: None,
            on_decision=lambda _decision: None,
        )
        self.coordination.opened()
        self.coordination.heard(m.Lead((0, "c")))

    def open(self) -> str:
        self.opened += 1
        assert self.go.wait(BOUND_S)
        if self.error is not None:
            raise self.error
        return f"host:{self.opened}"

    def proposed(self, decision: Decision, ballot: Ballot | None = None) -> None:
        self.coordination.heard(m.Propose(ballot or decision.value, decision, 0, True))

    def accepted(self) -> list[m.Accept]:
        sent = [call.args[0] for call in self.transport.transmit.call_args_list]
        return [message for message in sent if isinstance(message, m.Accept)]


def test_the_loop_is_served_while_a_name_server_is_silent(reactor: Reactor) -> None:
    node = Node(reactor)
    begun_s = time.monotonic()
    node.proposed(cycle(1))
    served: list[str] = []
    reactor.call_later(0.0, lambda: served.append("timer"))
    until(reactor, lambda: served)
    assert time.monotonic() - begun_s < BOUND_S / 2
    assert node.accepted() == []
    node.go.set()
    until(reactor, node.accepted)
    assert node.accepted() == [m.Accept((0, "c", 1), "host:1")]


def test_store_is_opened_once_for_a_decision(reactor: Reactor) -> None:
    node = Node(reactor)
    node.proposed(cycle(1))
    node.proposed(cycle(1), (0, "c", 2))
    node.go.set()
    until(reactor, node.accepted)
    node.proposed(cycle(1), (0, "c", 3))
    assert node.accepted() == [m.Accept((0, "c", 2), "host:1"), m.Accept((0, "c", 3), "host:1")]


def test_another_decision_has_another_store_and_the_one_before_is_not_accepted(reactor: Reactor) -> None:
    node = Node(reactor)
    for number in (1, 2, 3):
        node.proposed(cycle(number))
    node.go.set()
    until(reactor, node.accepted)
    assert node.accepted() == [m.Accept((0, "c", 3), "host:2")]


def test_store_that_cannot_be_opened_is_an_error_of_the_loop(reactor: Reactor) -> None:
    node = Node(reactor)
    node.error = RankStoreError("the port isn't free")
    node.proposed(cycle(1))
    node.go.set()
    with pytest.raises(RankStoreError, match="isn't free"):
        until(reactor, node.accepted)
    assert node.accepted() == []


def test_store_error_is_ignored_once_the_launcher_has_left(reactor: Reactor) -> None:
    node = Node(reactor)
    node.error = RankStoreError("the port isn't free")
    node.proposed(cycle(1))
    node.coordination.heard(m.Dismiss(0))
    node.go.set()
    until(reactor, lambda: node.coordination._wants_store is None)
    assert node.accepted() == []
