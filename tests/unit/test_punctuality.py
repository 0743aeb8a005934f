"""The launcher's own timeouts: pauses and stand-stills count for no rank."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.core.board.pauses import Pauses
from megatron_ft.core.diagnosis.exits import HangVerdict
from megatron_ft.core.records.monitor import Attached, Detached
from megatron_ft.ipc.files.event_log import NullEventLog
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.cycle import deadlines
from megatron_ft.launcher.cycle.deadlines import Punctuality
from megatron_ft.launcher.processes import process_tree


class Rank:
    """Stands in for a worker that never ends by itself."""

    def __init__(self) -> None:
        self.local_rank, self.pid = 0, 1
        self.started_at_ns = time.monotonic_ns()
        self.signals_sent: set[int] = set()
        self.received: list[int] = []

    def look(self) -> bool:
        return signal.SIGKILL in self.received

    def signal(self, number: int, *, whole_group: bool) -> None:
        assert not whole_group
        self.received.append(number)


class Setting:
    """One rank under one `Punctuality`, with everything around it at hand."""

    def __init__(self, **options: Any) -> None:
        self.reactor, self.pauses, self.rank = Reactor(), Pauses(), Rank()
        self.said: list[str] = []
        self.hung: list[HangVerdict] = []
        self.stopping = False
        record = SimpleNamespace(
            cycle=0,
            global_ranks=[5],
            workers={0: self.rank},
            iteration_of=lambda _local_rank: None,
            only_exits_are_missing=lambda: False,
            found_hung=self.hung.append,
        )
        self.punctuality = Punctuality(
            **{
                "startup_timeout_s": None,
                "exit_timeout_s": None,
                "first_signal": signal.SIGKILL,
                "observe_only": False,
                **options,
            },
            pauses=self.pauses,
            is_stopping=lambda: self.stopping,
            reactor=self.reactor,
            log=NullEventLog(),
            say=self.said.append,
        )
        self.punctuality.begin(record)  # type: ignore[arg-type]

    def serve(self, seconds: float) -> bool:
        """Until the rank was found hung, at most that long; whether it was."""
        return self.reactor.run_until(lambda: bool(self.hung), time.monotonic() + seconds)

    def heard(self, kind: type[Attached | Detached]) -> None:
        self.punctuality.heard(0, kind(rank=5, cycle=0, pid=1, at_ns=time.monotonic_ns()))


@pytest.fixture(autouse=True)
def nobody_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "is_stopped", lambda _pid: False)


def test_late_start() -> None:
    setting = Setting(startup_timeout_s=0.1)
    assert setting.serve(5)
    assert (setting.hung[0].rank, setting.hung[0].kind) == (5, "startup")
    assert setting.hung[0].elapsed_s >= 0.1
    assert setting.rank.received == [signal.SIGKILL, signal.SIGCONT]


def test_start_in_time() -> None:
    setting = Setting(startup_timeout_s=0.1)
    setting.heard(Attached)
    assert not setting.serve(0.3)


def test_messages_of_another_cycle_mean_nothing() -> None:
    setting = Setting(startup_timeout_s=0.1)
    setting.punctuality.heard(0, Attached(rank=5, cycle=7, pid=1))
    assert setting.serve(5)


def test_nobody_need_start_any_more_when_the_launcher_stops() -> None:
    setting = Setting(startup_timeout_s=0.05)
    setting.stopping = True
    assert not setting.serve(0.2)


def test_late_exit_counts_from_the_first_goodbye() -> None:
    setting = Setting(exit_timeout_s=0.2)
    setting.heard(Attached)
    setting.heard(Detached)
    setting.reactor.run_until(lambda: False, time.monotonic() + 0.15)
    setting.heard(Detached)  # by a monitor that has replaced the first
    started = time.monotonic()
    assert setting.serve(5)
    assert setting.hung[0].kind == "exit"
    assert time.monotonic() - started < 0.15


def test_a_pause_counts_for_nobody() -> None:
    setting = Setting(startup_timeout_s=0.2)
    setting.pauses.begin(time.monotonic_ns())
    assert not setting.serve(0.6)
    setting.pauses.end(time.monotonic_ns())
    resumed = time.monotonic()
    assert setting.serve(5)
    assert time.monotonic() - resumed > 0.15
    assert setting.hung[0].elapsed_s < 0.6


def test_a_node_that_stood_still_counts_for_nobody() -> None:
    setting = Setting(startup_timeout_s=0.2)
    time.sleep(0.9)  # the loop doesn't run: timers are late by 0.7 s
    assert not setting.serve(0.1)
    assert setting.serve(5)
    assert setting.hung[0].elapsed_s < 0.5


def test_a_stand_still_that_was_over_before_the_timer_counts_for_nobody_either() -> None:
    """No timer is late then, but SIGCONT came: the launcher was stopped, and its ranks with it."""
    setting = Setting(startup_timeout_s=0.5)
    time.sleep(0.3)
    continued = time.monotonic()
    setting.punctuality.stood_still()
    assert setting.serve(5)
    assert time.monotonic() - continued >= 0.5
    assert setting.hung[0].elapsed_s >= 0.5


@pytest.mark.parametrize("is_told", [True, False])
def test_a_stand_still_in_a_pause_is_taken_off_once(monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    """By SIGCONT or a late timer, and by the pause; the rank would have as much more time than it is given."""
    setting, now = Setting(startup_timeout_s=0.2), time.monotonic_ns
    setting.pauses.begin(now())
    monkeypatch.setattr(time, "monotonic_ns", lambda: now() + 60_000_000_000)
    setting.pauses.end(time.monotonic_ns())
    if is_told:
        setting.punctuality.stood_still()
    assert setting.serve(5)
    assert 0.2 <= setting.hung[0].elapsed_s < 5


def test_a_rank_that_gets_no_cpu_has_more_time_before_sigkill(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, waited_ns = Setting(startup_timeout_s=0.05, first_signal=signal.SIGTERM), 0
    monkeypatch.setattr(deadlines, "_GRACE_S", 0.05)
    monkeypatch.setattr(deadlines, "run_delays_ns", lambda pid: {pid: waited_ns})
    assert setting.serve(5)
    signalled, waited_ns = time.monotonic(), 400_000_000
    assert setting.rank.received == [signal.SIGTERM, signal.SIGCONT]
    assert setting.reactor.run_until(setting.rank.look, time.monotonic() + 20)
    assert time.monotonic() - signalled >= 0.4


def test_pauses() -> None:
    pauses = Pauses()
    assert not pauses.end(5)
    assert pauses.begin(10)
    assert not pauses.begin(11)
    assert pauses.within(0, 14) == 4
    assert pauses.within(12, 14) == 2
    assert pauses.end(20)
    assert pauses.begin(30)
    assert pauses.within(0, 35) == 15
    assert pauses.within(15, 31) == 6
    assert pauses.within(40, 50) == 10
    assert pauses.within(21, 29) == 0
