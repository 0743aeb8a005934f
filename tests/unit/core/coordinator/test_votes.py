"""Which voters have lately been at a coordinator that doesn't lead."""

from __future__ import annotations

from megatron_ft.core.coordinator.votes import Visitors


def test_a_voter_counts_for_ten_seconds_after_it_was_seen_last_unless_it_has_left_the_job() -> None:
    visitors = Visitors()
    visitors.are_here([1, 2], 0.0)
    visitors.are_here([2, 3], 5.0)
    assert sorted(visitors.lately(10.0, left=())) == [1, 2, 3]
    assert sorted(visitors.lately(10.1, left=())) == [2, 3]
    assert sorted(visitors.lately(10.1, left={3})) == [2]
    assert visitors.lately(16.0, left=()) == []
