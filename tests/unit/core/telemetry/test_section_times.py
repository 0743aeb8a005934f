"""Histograms of section times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_ft.core.board.layout import EVENT_END, EVENT_HEARTBEAT, EVENT_START, KIND_SHIFT, SECTION_SHIFT
from megatron_ft.core.telemetry.section_times import BOUNDS_S, SectionTimes
from tests.support.status_facts import snapshot

MS = 1_000_000
STEP, SAVE = 0, 1
Event = tuple[int, int, int]
"""Milliseconds, kind, and index of the section."""


def words(events: Sequence[Event]) -> list[int]:
    return [w for at, kind, index in events for w in (at * MS, (kind << KIND_SHIFT) | (index << SECTION_SHIFT))]


def fed(times: SectionTimes, events: Sequence[Event], *, first: int = 0, cycle: int = 0, local_rank: int = 0) -> None:
    times.feed(local_rank, snapshot(cycle=cycle), first, words(events))


def test_sections_count_in_the_bucket_that_holds_their_time() -> None:
    times = SectionTimes()
    fed(times, [(0, EVENT_START, STEP), (50, EVENT_START, SAVE), (60, EVENT_END, SAVE), (200, EVENT_END, STEP)])
    fed(times, [(300, EVENT_HEARTBEAT, 0), (400, EVENT_START, STEP), (2_000_000, EVENT_END, STEP)], first=4)
    step, save = times.histograms()["step"], times.histograms()["save"]
    assert (step.counts[BOUNDS_S.index(0.2)], step.counts[-1], sum(step.counts)) == (1, 1, 2)
    assert step.sum_s == pytest.approx(0.2 + 1999.6)
    assert save.counts[BOUNDS_S.index(0.01)] == 1


def test_section_that_is_open_between_two_readings_counts_once() -> None:
    times = SectionTimes()
    fed(times, [(0, EVENT_START, STEP)])
    assert times.histograms() == {}
    fed(times, [(100, EVENT_END, STEP)], first=1)
    assert sum(times.histograms()["step"].counts) == 1
    assert times.read_to(0, snapshot()) == 2


def test_section_whose_start_was_lost_is_left_out() -> None:
    times = SectionTimes()
    fed(times, [(0, EVENT_START, STEP)])
    fed(times, [(900, EVENT_END, STEP), (1000, EVENT_START, STEP), (1500, EVENT_END, STEP)], first=50)
    assert times.histograms()["step"].sum_s == 0.5


def test_next_cycle_begins_with_a_fresh_board_and_adds_to_the_same_histogram() -> None:
    times = SectionTimes()
    fed(times, [(0, EVENT_START, STEP), (100, EVENT_END, STEP), (200, EVENT_START, STEP)])
    assert times.read_to(0, snapshot(cycle=1)) == 0
    fed(times, [(900, EVENT_END, STEP), (1000, EVENT_START, STEP), (1100, EVENT_END, STEP)], cycle=1)
    fed(times, [(0, EVENT_START, STEP), (100, EVENT_END, STEP)], local_rank=1)
    assert sum(times.histograms()["step"].counts) == 3
