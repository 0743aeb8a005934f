"""Signals in words; and whether one to stop is the first request, the same once more, or the second."""

from __future__ import annotations

import pytest

from megatron_ft.link.base.signal_rules import Asked, SecondRequest

FIRST, SAME, AGAIN = Asked.FIRST, Asked.SAME, Asked.AGAIN


@pytest.mark.parametrize(
    ("times", "asked"),
    [
        ([0.0], [FIRST]),
        ([0.0, 0.006], [FIRST, SAME]),  # Slurm
        ([0.0, 4.99, 5.0], [FIRST, SAME, AGAIN]),
        ([0.0, 4.0, 8.0], [FIRST, SAME, AGAIN]),  # from the first on, however often it came since
        ([0.0, 6.0, 7.0], [FIRST, AGAIN, AGAIN]),
    ],
)
def test_five_seconds_after_the_first_it_is_a_second_request(times: list[float], asked: list[Asked]) -> None:
    request = SecondRequest()
    assert [request.note(1000.0 + at_s) for at_s in times] == asked
