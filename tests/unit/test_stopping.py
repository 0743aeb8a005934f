"""How ranks are stopped on request."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.cycle import stopping
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.processes.worker import Worker


class Stopped:
    """A node with one rank that obeys nothing, as far as ``stop_as_asked`` looks at one; ``done`` has what it does."""

    def __init__(self, *requests: signal.Signals, meanwhile: list[signal.Signals], after_s: float = 60.0) -> None:
        """``meanwhile`` come while the first of the requests is passed on; ``after_s`` lies between any two."""
        self.meanwhile = meanwhile
        self.done: list[str] = []
        self.signals = SignalWatch(())
        self.now_s, self.after_s = 100.0, after_s
        self.come(requests)
        self.line = SimpleNamespace(term_timeout=1800.0, ranks_are_python=True)
        self.ending = SimpleNamespace(ask=self._ask, kill=lambda _workers: self.done.append("kill"))
        self.reactor = SimpleNamespace(run_until=self._run_until)
        self.say = self.done.append

    def come(self, requests: Iterable[signal.Signals]) -> None:
        for number in requests:
            self.signals.note(number, self.now_s)
            self.now_s += self.after_s

    def tell_asked_to_stop(self, *, ranks: int) -> None:
        self.done.append(f"asked, {ranks}")

    def _ask(self, _workers: Any, number: signal.Signals, *, whole_group: bool) -> None:
        assert not whole_group
        self.done.append(number.name)
        meanwhile, self.meanwhile = self.meanwhile, []
        self.come(meanwhile)

    def _run_until(self, condition: Any, *, deadline_s: float) -> None:
        assert deadline_s > 0
        assert any(condition() for _ in range(3)), "nobody would ever kill the rank"

    def stop(self) -> list[str]:
        rank = cast(Worker, SimpleNamespace(exitcode=None, look=lambda: False))
        try:
            stopping.stop_as_asked(cast(Node, self), [rank])
        finally:
            self.signals.close()
        return self.done


KILLING = "received {} again: killing the ranks"


def test_the_second_request_is_told_of_when_it_comes_while_the_first_is_passed_on() -> None:
    for second in (signal.SIGINT, signal.SIGTERM):
        done = Stopped(signal.SIGTERM, meanwhile=[second]).stop()
        assert done == ["asked, 1", "SIGTERM", KILLING.format(second.name), "kill"]


def test_two_requests_before_the_ranks_are_looked_at() -> None:
    done = Stopped(signal.SIGTERM, signal.SIGINT, meanwhile=[]).stop()
    assert done == ["asked, 1", KILLING.format("SIGINT"), "kill"]


def test_a_hangup_kills_nobody() -> None:
    node = Stopped(signal.SIGHUP, signal.SIGTERM, meanwhile=[signal.SIGHUP, signal.SIGHUP])
    with pytest.raises(AssertionError, match="nobody would ever kill"):
        node.stop()
    assert node.done == ["asked, 1", "SIGHUP", "SIGTERM", "SIGHUP", "SIGHUP"]


TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("requests", "received", "second"),
    [
        ([(TERM, 0.0), (TERM, 0.006)], [TERM], None),  # Slurm: at the time limit, at preemption
        ([(TERM, 0.0), (TERM, 0.045), (TERM, 5.0)], [TERM, TERM], TERM),
        ([(INT, 0.0), (INT, 4.9), (INT, 4.95)], [INT], None),  # the keys pressed again and again
        ([(INT, 0.0), (INT, 1.0), (INT, 5.1), (TERM, 5.2)], [INT, INT, TERM], INT),
        ([(INT, 0.0), (TERM, 1.0)], [INT, TERM], None),  # ranks may heed only one of the two
        ([(INT, 0.0), (TERM, 7.0)], [INT, TERM], TERM),
        ([(HUP, 0.0), (TERM, 9.0), (TERM, 9.1)], [HUP, TERM], None),
        ([(HUP, 0.0), (HUP, 0.1), (HUP, 9.0)], [HUP, HUP, HUP], None),
    ],
)
def test_a_second_request_is_one_that_a_person_could_have_made(
    requests: list[tuple[signal.Signals, float]], received: list[signal.Signals], second: signal.Signals | None
) -> None:
    watch = SignalWatch(())
    for number, at_s in requests:
        watch.note(number, 1000.0 + at_s)
    watch.close()
    assert (watch.received, watch.second_request()) == (received, second)
    assert watch.ask_to_kill() == (second is not None)


def test_a_signal_that_comes_twice_at_once_goes_to_the_ranks_once_and_kills_nobody() -> None:
    node = Stopped(signal.SIGTERM, signal.SIGTERM, meanwhile=[signal.SIGTERM], after_s=0.02)
    with pytest.raises(AssertionError, match="nobody would ever kill"):
        node.stop()
    assert node.done == ["asked, 1", "SIGTERM"]
