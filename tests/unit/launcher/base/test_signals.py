"""Which signals to the launcher are a second request; a request breaks off what waits."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.rules.events import Continued, StopAsked
from megatron_ft.link.reactor import Reactor

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def watching(reactor: Any = None) -> SignalWatch:
    return SignalWatch(reactor)


@pytest.mark.parametrize(
    ("requests", "received", "second"),
    [
        ([(TERM, 0.0), (TERM, 0.006)], [TERM], None),  # Slurm: at the time limit, at preemption
        ([(TERM, 0.0), (TERM, 0.045), (TERM, 5.0)], [TERM, TERM], TERM),
        ([(INT, 0.0), (INT, 1.0), (INT, 5.1), (TERM, 5.2)], [INT, INT, TERM], INT),
        ([(INT, 0.0), (TERM, 1.0)], [INT, TERM], None),  # ranks may heed only one of the two
        ([(HUP, 0.0), (TERM, 9.0), (TERM, 9.1)], [HUP, TERM], None),
    ],
)
def test_a_second_request_is_one_that_a_person_could_have_made(
    requests: list[tuple[signal.Signals, float]], received: list[signal.Signals], second: signal.Signals | None
) -> None:
    watch = watching()
    for number, at_s in requests:
        watch.note(number, 1000.0 + at_s)
    watch.close()
    assert watch.received == received
    taken = [each for each in watch.take() if isinstance(each, StopAsked)]
    assert [each.number for each in taken] == received
    assert next((each.number for each in taken if each.again), None) == second
    assert watch.take() == []
    assert watch.is_in_a_hurry == (second is not None)


def test_early_second_interrupt_is_answered_with_the_seconds_left() -> None:
    watch = watching()
    for number, at_s in ((TERM, 0.0), (TERM, 0.006), (INT, 1.0)):
        watch.note(number, 1000.0 + at_s)
    first = [StopAsked(TERM), StopAsked(INT)]
    assert watch.take() == first, "Slurm sends SIGTERM twice; the first SIGINT is a request of its own"
    watch.note(INT, 1003.0)
    assert watch.take() == pytest.approx([2.0])
    assert watch.take() == []
    watch.close()


def test_continuation_of_the_node_comes_before_a_request_to_stop_that_waited_for_it() -> None:
    watch = watching()
    watch.install()
    watch.note(TERM, 0.0)
    signal.raise_signal(signal.SIGCONT)
    watch.close()
    assert [type(each) for each in watch.take()] == [Continued, StopAsked]


def test_request_to_stop_breaks_off_each_wait() -> None:
    reactor = Reactor()
    watch = watching(reactor)
    watch.check()
    assert watch.blocking(lambda: 3) == 3
    watch.note(signal.SIGTERM, 0.0)
    others_come = threading.Event()
    for _ in range(2):
        with pytest.raises(SignalException) as raised:
            watch.blocking(others_come.wait)
        assert raised.value.sigval == signal.SIGTERM
    others_come.set()
    watch.close()
    reactor.close()
