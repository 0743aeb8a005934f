"""What comes a million times is said a few times, and counted."""

from __future__ import annotations

import itertools

from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.base.rate_limiter import RateLimiter


def test_a_flood_is_said_a_few_times_and_then_once_a_minute_with_how_many_there_were() -> None:
    moderation = RateLimiter()
    said = [moderation.admit("no", 100.0) for _ in range(1000)]
    assert said[:7] == ["no"] * 7
    assert said[7] == "no (from now on one a minute)"
    assert said[8:] == [None] * 992
    assert moderation.admit("no", 150.0) is None
    assert moderation.admit("no", 165.0) == "no (993 like it since the last such line; from now on one a minute)"
    assert moderation.admit("no", 165.0) is None


def test_a_million_pauses_are_not_all_kept_and_none_of_their_time_is_lost() -> None:
    pauses = Pauses()
    for number in range(5000):
        assert pauses.begin(10 * number)
        assert pauses.end(10 * number + 4)
    spans = pauses.spans(10**6)
    assert len(spans) < 1100
    assert (spans[0][0], spans[-1]) == (0, (49_990, 49_994))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert pauses.within(49_000, 10**6) == 400
