"""A leader whose decisions are in etcd, on sockets: its launchers hear of one once etcd has it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_ft.job import service
from megatron_ft.job.parts import LEADER_PARTS, SAID_BY_PARTS
from megatron_ft.job.rules import etcd_keys
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Assignment, DecisionRecord
from megatron_ft.job.service import Service
from megatron_ft.link import tcp
from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import encode
from tests.support.coordination import Peer
from tests.support.etcd_model import EtcdModel

BOUND_S = 20.0
TO_MEMBER: Vocabulary[m.ToMember] = Vocabulary(m.TO_MEMBER | SAID_BY_PARTS)


class Launcher:
    """A launcher's end of a connection to a leader, whose etcd makes no change yet."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.model = EtcdModel()
        held = etcd_keys.take(self.model, "job", "a:1")
        assert held is not None
        ledger = etcd_keys.Ledger(self.model, "job", held.epoch, held.lease)
        self.model.refuses = "kv/txn"
        self.model.calls.clear()
        listener, rules = tcp.listen("127.0.0.1", 0), m.Rules(1, 1, join_timeout_s=1.0)
        machine = Coordinator("c", m.JobDefinition("job", rules), epoch=5, now_s=time.monotonic(), parts=LEADER_PARTS)
        self.recorded: list[DecisionRecord] = []
        self.service = Service(reactor, machine, listener=listener, keep=self.recorded.append, ledger=ledger)
        self.peer = Peer(socket.create_connection(listener.getsockname(), timeout=BOUND_S))
        self.heard: list[m.ToMember] = []
        self.say(m.Hello("job", rules, "i0", "host"))
        self.say(m.Ready(store="s:1"))

    def say(self, message: m.FromMember) -> None:
        self.peer.write(encode(message))

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve both ends, and answer the leader's questions, until that holds."""
        until_s = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < until_s
            self.reactor.run_once(0.01)
            for message in map(TO_MEMBER.parse, self.peer.read()):
                self.heard.append(message)
                if isinstance(message, m.Beat) and message.number:
                    self.say(message)

    def has(self, kind: type) -> bool:
        return any(isinstance(each, kind) for each in self.heard)


@pytest.fixture
def launcher(reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setattr(service, "AGAIN_S", 0.01)
    joined = Launcher(reactor)
    yield joined
    joined.peer.close()


def test_leader_that_can_start_no_thread_for_a_while_asks_etcd_again(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, call_in_thread = list[object](), launcher.reactor.call_in_thread

    def call(function: Callable[[], Any], done: Callable[[Callable[[], Any]], None]) -> None:
        tries.append(function)
        if len(tries) <= 5:
            raise RuntimeError("can't start new thread")
        call_in_thread(function, done)

    monkeypatch.setattr(launcher.reactor, "call_in_thread", call)
    launcher.model.refuses = ""
    launcher.until(lambda: launcher.has(Assignment))
    assert len(tries) > 5
    launcher.service.close()


@pytest.mark.parametrize("is_lost", [True, False])
def test_leader_that_has_lost_the_lock_or_gives_up_says_nothing_of_its_decision(
    launcher: Launcher, is_lost: bool
) -> None:
    launcher.until(lambda: "kv/txn" in launcher.model.calls)
    if is_lost:
        launcher.model.pass_time(etcd_keys.LEASE_S)
        launcher.model.refuses = ""
    launcher.until(lambda: launcher.service.is_over)
    heard = [*launcher.heard, *map(TO_MEMBER.parse, launcher.peer.read())]
    assert not any(isinstance(each, Assignment) for each in heard)
    assert [each.code for each in heard if isinstance(each, m.Dismiss)] == ([] if is_lost else [94])
