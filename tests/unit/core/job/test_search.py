"""In which order a launcher looks for the coordinator."""

from __future__ import annotations

from megatron_ft.core.job.coordinator_locator import CoordinatorLocator


def test_a_launcher_looks_again_where_the_job_was_led_after_each_other_address() -> None:
    search = CoordinatorLocator(("a", "b", "c"), own="me")
    assert [search.next(knows_job=True, now_s=0.0) for _ in range(6)] == ["a", "b", "a", "c", "a", "b"]
    assert search.next(knows_job=True, now_s=0.0) == "a"
    search.found()
    search.found_silent(10.0)
    assert [search.next(knows_job=True, now_s=now_s) for now_s in (10.0, 11.0, 13.0)] == ["b", "c", "a"]
    search.found_silent(13.0)
    assert [search.next(knows_job=True, now_s=now_s) for now_s in (13.0, 14.0, 18.0)] == ["b", "c", "a"]
    alone = CoordinatorLocator(("a",), own="a")
    assert [alone.next(knows_job=False, now_s=0.0) for _ in range(2)] == ["a", "a"]
    assert alone.told_of("b", 0.0)
    assert [alone.next(knows_job=False, now_s=0.0) for _ in range(3)] == ["b", "a", "b"]
    alone.found_silent(0.0)
    assert alone.next(knows_job=False, now_s=0.0) == "a"
    assert alone.home == "b"


def test_an_address_that_was_silent_is_tried_again_in_the_same_pass() -> None:
    search = CoordinatorLocator(("a", "b", "c", "d"), own="me")
    assert [search.next(knows_job=True, now_s=0.0) for _ in range(2)] == ["a", "b"]
    search.found_silent(1.0)
    assert [search.next(knows_job=True, now_s=now_s) for now_s in (1.0, 2.0)] == ["a", "c"]
    # its coordinator was frozen, goes on, and may take over: it is asked before another one
    assert [search.next(knows_job=True, now_s=now_s) for now_s in (3.0, 4.0)] == ["a", "b"]
    search.found_silent(5.0)
    assert [search.next(knows_job=True, now_s=now_s) for now_s in (5.0, 6.0, 7.0, 8.0)] == ["a", "d", "a", "c"]


def test_an_address_that_is_silent_for_days_is_tried_every_8_seconds() -> None:
    search = CoordinatorLocator(("a", "b"), own="me")
    for second in range(0, 20_000, 8):
        assert search.next(knows_job=True, now_s=float(second)) == "a"
        search.found_silent(float(second))
        assert search.next(knows_job=True, now_s=float(second)) == "b"


def test_addresses_are_all_tried_where_all_are_silent() -> None:
    search = CoordinatorLocator(("a", "b", "c"), own="me")
    tried = []
    for _ in range(6):
        tried.append(search.next(knows_job=True, now_s=0.0))
        search.found_silent(0.0)
    assert set(tried) == {"a", "b", "c"}
