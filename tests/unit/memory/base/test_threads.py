"""Work of a rank that is done in threads: by whom, and what becomes of failures."""

from __future__ import annotations

import threading

import pytest

from megatron_ft.memory.base.threads import each_of

BOUND_S = 20.0


def test_failure_of_a_thread_is_raised_in_the_calling_one_and_ends_the_others() -> None:
    both_began, helpers, done = threading.Barrier(2), list[threading.Thread](), list[int]()

    def work(item: int) -> None:
        if (thread := threading.current_thread()) is not threading.main_thread():
            helpers.append(thread)
            both_began.wait(BOUND_S)
            raise ValueError("an item")
        if not done:
            both_began.wait(BOUND_S)
            helpers[0].join(BOUND_S)
        done.append(item)

    with pytest.raises(ValueError, match="an item"):
        each_of([*range(10)], work, 2)
    assert len(done) == 1
