"""A leader whose decisions are in etcd says nothing that follows from one before etcd has it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_ft.core.codec import Vocabulary
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.wire import encode
from megatron_ft.job.etcd_leader import LeaderInEtcd, LockLost
from megatron_ft.job.parts import LEADER_PARTS, SAID_BY_PARTS
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import Assignment, Decision, DecisionKind, DecisionRecord, FormerDecision
from megatron_ft.job.service import Service

BOUND_S = 20.0
TO_MEMBER: Vocabulary[m.ToMember] = Vocabulary(m.TO_MEMBER | SAID_BY_PARTS)


class FakeEtcd(LeaderInEtcd):
    """Changes are made when the test says so."""

    def __init__(self) -> None:
        self.problem, self.away_since_s = "", 0.0
        self.asked: list[str] = []
        self.lost = False
        self._made = 0
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    @property
    def due_s(self) -> float:
        return float("inf")

    def renew(self, now_s: float) -> None:
        """Do nothing."""

    def keep(self, record: DecisionRecord) -> None:
        self.asked.append(f"{record.decision.kind.value} {record.decision.number}")

    def begin_life(self) -> None:
        self.asked.append("life")

    def take(self) -> int:
        os.eventfd_read(self._event)
        if self.lost:
            raise LockLost
        made, self._made = self._made, 0
        return made

    def tell(self, *, made: int = 0) -> None:
        self._made += made
        os.eventfd_write(self._event, 1)


class Launcher:
    """A launcher's end of a connection to a leader in etcd."""

    def __init__(self, rules: m.Rules, former: FormerDecision | None = None) -> None:
        listener = tcp.listen("127.0.0.1", 0)
        machine = Coordinator(
            "c", m.JobDefinition("job", rules), epoch=5, former=former, now_s=time.monotonic(), parts=LEADER_PARTS
        )
        self.etcd, self.has_ended = FakeEtcd(), False
        self.recorded: list[DecisionRecord] = []
        owner = os.pidfd_open(os.getpid())
        self.service = Service(listener, machine, secret=None, owner=owner, keep=self.recorded.append, etcd=self.etcd)
        self.peer = tcp.Peer(socket.create_connection(listener.getsockname(), timeout=BOUND_S))
        self.heard: list[m.ToMember] = []
        self.say(m.Hello("job", rules, "i0", 1, "host", since=9))
        self.say(m.Ready(store="s:1"))

    def say(self, message: m.FromMember) -> None:
        self.peer.write(encode(message))
        self.peer.flush()

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve both ends, and answer the leader's questions, until that holds."""
        until_s = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < until_s
            self.service.run_once()
            for message in map(TO_MEMBER.parse, self.peer.read()):
                self.heard.append(message)
                if isinstance(message, m.Beat) and message.number:
                    self.say(message)

    def run_to_its_end(self) -> None:
        """Serve the leader until it ends by itself."""
        self.has_ended = True
        self.service.run()

    def has(self, kind: type) -> bool:
        return any(isinstance(each, kind) for each in self.heard)


@pytest.fixture
def join() -> Iterator[Callable[..., Launcher]]:
    joined: list[Launcher] = []

    def join(former: FormerDecision | None = None, *, join_timeout_s: float = 600.0) -> Launcher:
        joined.append(Launcher(m.Rules(1, 1, join_timeout_s=join_timeout_s), former))
        return joined[-1]

    yield join
    for each in joined:
        if not each.has_ended:
            each.service.close()
        each.peer.close()


def test_launcher_hears_of_a_decision_once_etcd_has_it_and_of_life_before(join: Callable[..., Launcher]) -> None:
    launcher = join()
    launcher.until(lambda: launcher.etcd.asked == ["start 0"])
    launcher.say(m.Beat())
    launcher.until(lambda: m.Beat() in launcher.heard)
    assert launcher.heard[0] == m.Admitted(5)
    assert not launcher.has(Assignment)
    assert launcher.recorded == []
    launcher.etcd.tell(made=1)
    launcher.until(lambda: launcher.has(Assignment))
    assert [record.decision.number for record in launcher.recorded] == [0]


def test_decision_of_a_run_that_begins_waits_for_its_life(
    join: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_ft.job.rules.coordinator.FORMER_S", 0.0)
    launcher = join(FormerDecision(DecisionRecord(Decision(0, "old", DecisionKind.START, 0, 1)), 3))
    launcher.until(lambda: launcher.etcd.asked == ["life"])
    launcher.etcd.tell(made=1)
    launcher.until(lambda: launcher.etcd.asked == ["life", "start 0"])
    assert launcher.recorded == []
    launcher.etcd.tell(made=1)
    launcher.until(lambda: launcher.has(Assignment))


def test_leader_that_has_lost_the_lock_says_nothing_more(join: Callable[..., Launcher]) -> None:
    launcher = join()
    launcher.until(lambda: launcher.etcd.asked == ["start 0"])
    launcher.etcd.lost = True
    launcher.etcd.tell()
    launcher.run_to_its_end()
    assert not launcher.has(Assignment)
    assert not [each for each in map(TO_MEMBER.parse, launcher.peer.read()) if isinstance(each, Assignment)]


def test_launchers_are_told_to_be_started_again_if_etcd_is_away_for_the_join_timeout(
    join: Callable[..., Launcher],
) -> None:
    launcher = join(join_timeout_s=60.0)
    launcher.until(lambda: launcher.etcd.asked == ["start 0"])
    launcher.etcd.problem, launcher.etcd.away_since_s = "etcd is away", time.monotonic() - 59.0
    launcher.etcd.tell()
    launcher.service.run_once()
    assert not launcher.has(m.Dismiss)
    launcher.etcd.away_since_s -= 1.0
    launcher.etcd.tell()
    launcher.run_to_its_end()
    (dismissed,) = [each for each in map(TO_MEMBER.parse, launcher.peer.read()) if isinstance(each, m.Dismiss)]
    assert (dismissed.code, dismissed.text) == (94, "no decision could be kept for 60 s: etcd is away")
