"""Where the main thread is, as another thread of the same process sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from megatron_ft.rank.crash_reporter.main_thread import main_places


def seen_while(work: Callable[[], object]) -> list[list[str]]:
    """What another thread sees of this one while it works, until that thread has seen enough."""
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.extend(main_places(10)))
    thread.start()
    while thread.is_alive():
        work()
    return found


def test_a_thread_that_computes_is_seen_in_several_places() -> None:
    def one() -> None:
        for _ in range(2000):
            pass

    def other() -> None:
        for _ in range(2000):
            pass

    def both() -> None:
        one()
        other()

    places = seen_while(both)
    assert len(places) > 1
    assert any(place[0].startswith("test_main_thread.py:") for place in places)


def test_a_thread_that_waits_is_seen_in_one() -> None:
    found: list[list[str]] = []
    done = threading.Event()

    def look() -> None:
        found.extend(main_places(10))
        done.set()

    threading.Thread(target=look).start()
    done.wait()
    # it may have been on its way there when it was looked at first
    assert len(found) <= 2
    assert any(" wait @" in call for call in found[-1])
