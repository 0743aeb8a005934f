"""When a node that stands aside is looked at again, and how often that is told."""

from __future__ import annotations

from megatron_ft.launcher.rules.agent import retry_delay_s


def test_health_check_is_retried_with_delays_of_two_seconds_to_a_minute() -> None:
    assert [retry_delay_s(failures) for failures in (1, 2, 3, 5, 6, 7, 100_000)] == [2, 4, 8, 32, 60, 60, 60]
