"""Intervals from a simulated rank's ring events, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from megatron_ft.learning.intervals import BoardIntervals, reached_by
from megatron_ft.learning.messages import FACT_SAVED, FACT_SETUP_OPEN, Observed
from megatron_ft.link.base import layout
from megatron_ft.link.base.layout import BoardSnapshot, SectionView
from megatron_ft.link.facts.minutes import MINUTE_NS, MOST_SPANS, RankMinute, bucket_of
from megatron_ft.monitor.rules.hang_detector import Gap
from tests.fuzz.healthy import BOARD

S = 1_000_000_000
START = BOARD.start_ns
NAMES = ("setup", "step", "save")
IDLE = "out_of_section"


class Rank:
    """Opens and closes sections; writes what a recorder would."""

    def __init__(self) -> None:
        self.now = START
        self.words: list[int] = []
        self.opened: dict[str, int] = {}
        self.counts = dict.fromkeys(NAMES, 0)
        self.transition = START
        self.changes: dict[str, Any] = {}
        self.ended: list[tuple[str, int, int]] = []
        """All intervals: the section, when it began and when it ended."""
        self._idle_since = START

    @property
    def head(self) -> int:
        return len(self.words) // 2

    def passes(self, seconds: float) -> None:
        self.now += round(seconds * S)

    def start(self, name: str) -> None:
        if not self.opened:
            self.ended.append((IDLE, self._idle_since, self.now))
        self.opened[name] = self.now
        self.counts[name] += 1
        self.write(layout.EVENT_START, NAMES.index(name) << layout.SECTION_SHIFT)

    def end(self, name: str) -> None:
        self.ended.append((name, self.opened.pop(name), self.now))
        self._idle_since = self.now
        self.write(layout.EVENT_END, NAMES.index(name) << layout.SECTION_SHIFT)

    def spend(self, name: str, seconds: float, *, before_s: float = 0.0) -> None:
        self.passes(before_s)
        self.start(name)
        self.passes(seconds)
        self.end(name)

    def write(self, kind: int, value: int = 0) -> None:
        self.transition = self.now
        self.words += (self.now, kind << layout.KIND_SHIFT | value)

    def board(self) -> BoardSnapshot:
        sections = tuple(SectionView(name, self.opened.get(name, 0), self.counts[name], None) for name in NAMES)
        return BOARD._replace(
            sections=sections, ring_head=self.head, last_transition_ns=self.transition, rank=3
        )._replace(**self.changes)


class Watch:
    """A monitor's intervals of one rank."""

    def __init__(self, rank: Rank, *, takes_over: bool = False) -> None:
        self.rank = rank
        self.gaps: list[Gap] = []
        board = rank.board()
        self.intervals = BoardIntervals(board, from_ring_head=board.ring_head if takes_over else 0)

    def look(self) -> Mapping[str, Observed]:
        board, rank = self.rank.board(), self.rank
        first = max(self.intervals.read_to, board.ring_head - layout.RING_EVENTS)
        self.intervals.feed(first, rank.words[2 * first : 2 * board.ring_head], board, rank.now, self.gaps)
        return self.intervals.observed(board, rank.now, self.gaps).seen

    def minute(self) -> RankMinute:
        self.look()
        (row,) = self.intervals.take_minute(self.rank.board(), self.rank.now, self.gaps).ranks
        return row


def lengths(rank: Rank, name: str) -> list[float]:
    return [(end - start) / S for which, start, end in rank.ended if which == name]


def test_section_that_was_never_opened_is_empty_and_what_is_open_counts_with_its_age() -> None:
    rank = Rank()
    watch = Watch(rank)
    rank.passes(2)
    assert watch.look() == {**{name: Observed(rank=3) for name in NAMES}, IDLE: Observed(0, 2.0, 3)}
    rank.start("step")
    rank.passes(7)
    assert watch.look()["step"] == Observed(0, 7.0, 3)
    assert watch.look()[IDLE] == Observed(1, 2.0, 3)


@pytest.mark.parametrize("ends", ["run_ends", "closing"])
def test_time_out_of_section_that_is_open_when_the_run_ends_counts_as_observed(ends: str) -> None:
    rank = Rank()
    watch = Watch(rank)
    rank.spend("step", 1.0, before_s=0.5)
    rank.passes(4)
    if ends == "run_ends":
        rank.changes["learning_facts"] = layout.FACT_RUN_ENDS
    else:
        rank.changes["closing"] = True
    assert watch.look()[IDLE] == Observed(2, 4.0, 3)
    rank.passes(9)
    assert watch.look()[IDLE] == Observed(2, 4.0, 3), "what the rank does afterwards isn't in its run"


def test_a_pause_is_in_no_interval() -> None:
    rank = Rank()
    watch = Watch(rank)
    rank.start("step")
    rank.passes(1)
    watch.look()
    watch.gaps.append(Gap(rank.now, rank.now + 3600 * S, 3600 * S, 0))
    rank.passes(3601)
    assert watch.look()["step"].longest_s == 2.0
    rank.end("step")
    assert watch.look()["step"] == Observed(1, 2.0, 3)


@pytest.mark.parametrize("seed", range(20))
def test_intervals_of_a_random_rank_are_all_counted_however_often_it_is_looked_at(seed: int) -> None:
    rng = random.Random(seed)
    rank = Rank()
    watch = Watch(rank)
    for _ in range(400):
        rank.passes(rng.lognormvariate(0, 1))
        name = rng.choice(NAMES)
        (rank.end if name in rank.opened else rank.start)(name)
        if rng.random() < 0.2:
            watch.look()
    for name in [*rank.opened]:
        rank.end(name)
    found = watch.look()
    for name in NAMES:
        assert found[name] == Observed(len(lengths(rank, name)), max(lengths(rank, name)), 3)
    assert found[IDLE] == Observed(len(lengths(rank, IDLE)), max(lengths(rank, IDLE)), 3)


@pytest.mark.parametrize("seed", range(10))
def test_lost_events_invent_no_interval(seed: int) -> None:
    """The ring was overrun between two looks, several times, with sections open across it."""
    rng = random.Random(seed)
    rank = Rank()
    watch = Watch(rank)
    for _ in range(3):
        for _ in range(rng.randrange(layout.RING_EVENTS, 2 * layout.RING_EVENTS)):
            rank.passes(rng.lognormvariate(0, 1))
            name = rng.choices(NAMES, (1, 1000, 100))[0]
            (rank.end if name in rank.opened else rank.start)(name)
        found = watch.look()
        for name in (*NAMES, IDLE):
            real = lengths(rank, name)
            open_s = (rank.now - rank.opened[name]) / S if name in rank.opened else 0.0
            assert found[name].count <= len(real)
            assert found[name].longest_s <= max([*real, open_s, (rank.now - rank.transition) / S])
        assert found["step"].count > layout.RING_EVENTS / 4


def test_long_open_section_keeps_its_start_across_lost_events() -> None:
    rank = Rank()
    watch = Watch(rank)
    rank.start("setup")
    for _ in range(layout.RING_EVENTS):
        rank.spend("step", 0.001, before_s=0.001)
    assert watch.look()[IDLE].count == 0, "it never was out of section"
    rank.end("setup")
    assert watch.look()["setup"] == Observed(1, 2 * layout.RING_EVENTS * 0.001, 3)


def test_a_monitor_that_takes_over_counts_from_then_on_and_knows_what_is_open() -> None:
    rank = Rank()
    rank.spend("step", 9.0)
    rank.start("step")
    rank.passes(3)
    watch = Watch(rank, takes_over=True)
    assert watch.look()["step"] == Observed(0, 3.0, 3)
    rank.passes(1)
    rank.end("step")
    rank.spend("step", 2.0, before_s=6.0)
    assert watch.look()["step"] == Observed(2, 4.0, 3)
    assert watch.look()[IDLE] == Observed(1, 6.0, 3)


def test_event_with_a_time_outside_the_cycle_begins_no_interval() -> None:
    rank = Rank()
    watch = Watch(rank)
    rank.start("step")
    rank.words[-2] = START - 1
    rank.passes(1)
    rank.start("save")
    rank.passes(1)
    rank.end("step")
    rank.end("save")
    found = watch.look()
    assert (found["step"].count, found["save"].count, found[IDLE].count) == (0, 1, 0)


def test_heartbeats_are_counted_from_one_look_to_another() -> None:
    rank = Rank()
    watch = Watch(rank)
    for _ in range(2):
        rank.passes(2)
        rank.write(layout.EVENT_HEARTBEAT)
        watch.look()
    assert watch.minute().sections["heartbeat"].longest_s == 2.0


def test_section_that_is_closed_without_an_event_ends_the_time_since_then() -> None:
    """A signal handler and a hook have raced: the board is right."""
    rank = Rank()
    watch = Watch(rank)
    rank.start("step")
    rank.passes(5)
    watch.look()
    del rank.opened["step"]
    watch.look()
    rank.passes(2)
    rank.transition = rank.now
    watch.look()
    rank.spend("save", 1.0, before_s=3.0)
    found = watch.look()
    assert (found["step"].count, found[IDLE].longest_s) == (0, 3.0)


def test_minute_holds_what_has_ended_since_the_last_one_and_what_is_open() -> None:
    rank = Rank()
    watch = Watch(rank)
    rank.now = rank.now - rank.now % MINUTE_NS + MINUTE_NS
    rank.write(layout.EVENT_ITERATION, 7)
    for _ in range(MOST_SPANS + 1):
        rank.spend("step", 0.5, before_s=0.1)
        rank.write(layout.EVENT_HEARTBEAT)
    rank.start("save")
    rank.passes(2.0)
    rank.end("save")
    rank.write(layout.EVENT_ITERATION, 9)
    rank.start("setup")
    rank.passes(4.0)
    minute = watch.minute()
    step, save, setup, idle = (minute.sections[name] for name in ("step", "save", "setup", IDLE))
    assert (step.count, step.longest_s, step.counts, step.spans) == (7, 0.5, {bucket_of(0.5): 7}, [])
    assert (save.spans[0][1], save.total_s, save.open_s) == (2.0, 2.0, -1)
    assert (setup.count, setup.open_s) == (0, 4.0)
    assert idle.count == 9
    assert sum(idle.counts.values()) == idle.count - 4, "the first ones of a cycle are told apart"
    assert minute.sections["heartbeat"].count == MOST_SPANS
    assert [number for number, _ in minute.iterations] == [7, 9]
    rank.passes(60)
    rank.end("setup")
    later = watch.minute()
    assert {name: each.count for name, each in later.sections.items()} == {"setup": 1}
    assert later.sections["setup"].longest_s == 64.0


@pytest.mark.parametrize(("steps", "milestone"), [(31, 0), (32, 32), (40, 32), (64, 64), (200, 128)])
def test_milestones_are_saves_and_doubled_numbers_of_steps(steps: int, milestone: int) -> None:
    assert reached_by(BOARD._replace(steps=steps, saves=2, learning_facts=layout.FACT_HOOKS)) == (2, milestone)
    assert reached_by(BOARD._replace(iterations_seen=steps)) == (0, milestone), "a loop without hooks counts no steps"


def test_facts_are_those_of_the_board() -> None:
    said = layout.FACT_LEARNS | layout.FACT_LOADED | layout.FACT_ASYNC_SAVES
    board = BOARD._replace(learning_facts=said, saves=1, sections=(SectionView("setup", START, 1, None),))
    found = BoardIntervals(board).observed(board, START)
    assert (found.facts, found.ended) == (said | FACT_SAVED | FACT_SETUP_OPEN, False)
    board = BOARD._replace(learning_facts=layout.FACT_RUN_ENDS, saves=0)
    assert BoardIntervals(board).observed(board, START).ended
    board = BOARD._replace(closing=True)
    assert not BoardIntervals(board).observed(board, START).ended, "it has only ended its monitoring"
