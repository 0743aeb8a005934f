"""How ranks are stopped on request."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_ft.launcher import stopping
from megatron_ft.launcher.node import Node
from megatron_ft.launcher.signals import SignalWatch
from megatron_ft.launcher.workers import Worker


class Stopped:
    """A node with one rank that obeys nothing, as far as ``stop_as_asked`` looks at one; ``done`` has what it does."""

    def __init__(self, *requests: signal.Signals, meanwhile: list[signal.Signals]) -> None:
        """``meanwhile`` come while the first of the requests is passed on."""
        self.meanwhile = meanwhile
        self.done: list[str] = []
        self.signals = SignalWatch(())
        self.signals.received.extend(requests)
        self.line = SimpleNamespace(term_timeout=1800.0, ranks_are_python=True)
        self.ending = SimpleNamespace(ask=self._ask, kill=lambda _workers: self.done.append("kill"))
        self.reactor = SimpleNamespace(run_until=self._run_until)
        self.say = self.done.append

    def tell_asked_to_stop(self, *, ranks: int) -> None:
        self.done.append(f"asked, {ranks}")

    def _ask(self, _workers: Any, number: signal.Signals, *, whole_group: bool) -> None:
        assert not whole_group
        self.done.append(number.name)
        self.signals.received.extend(self.meanwhile)
        self.meanwhile = []

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


KILLING = "asked again by {}: killing the ranks"


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
