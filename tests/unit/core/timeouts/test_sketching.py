"""Sketches of intervals from a simulated rank's ring events, in simulated time."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from megatron_ft.core.board import layout
from megatron_ft.core.board.hang_detector import Gap
from megatron_ft.core.board.intervals import FIRST_INTERVALS, HangKind, IntervalKey
from megatron_ft.core.board.layout import BoardSnapshot, SectionView
from megatron_ft.core.timeouts.exchange import Facts, Milestone, Moment
from megatron_ft.core.timeouts.minutes import MINUTE_NS, MOST_SPANS, RankMinute, read_rows
from megatron_ft.core.timeouts.sketch import NO_INTERVAL, Sketch, add_up
from megatron_ft.core.timeouts.sketching import Milestones, SectionSketches, facts_of
from megatron_ft.core.timeouts.tail import bucket_of
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
        self._write(layout.EVENT_START, name)

    def end(self, name: str) -> None:
        self.ended.append((name, self.opened.pop(name), self.now))
        self._idle_since = self.now
        self._write(layout.EVENT_END, name)

    def spend(self, name: str, seconds: float, *, before_s: float = 0.0) -> None:
        self.passes(before_s)
        self.start(name)
        self.passes(seconds)
        self.end(name)

    def board(self) -> BoardSnapshot:
        sections = tuple(SectionView(name, self.opened.get(name, 0), self.counts[name], None) for name in NAMES)
        return BOARD._replace(
            sections=sections, ring_head=self.head, last_transition_ns=self.transition, rank=3
        )._replace(**self.changes)

    def _write(self, kind: int, name: str) -> None:
        self.transition = self.now
        self.words += (self.now, kind << layout.KIND_SHIFT | NAMES.index(name) << layout.SECTION_SHIFT)


class Watch:
    """A monitor's sketches of one rank."""

    def __init__(self, rank: Rank, *, takes_over: bool = False) -> None:
        self.rank = rank
        self.gaps: list[Gap] = []
        board = rank.board()
        self.sketches = SectionSketches(board, from_ring_head=board.ring_head if takes_over else 0)

    def look(self) -> dict[str, Sketch]:
        board, rank = self.rank.board(), self.rank
        first = max(self.sketches.read_to, board.ring_head - layout.RING_EVENTS)
        self.sketches.feed(first, rank.words[2 * first : 2 * board.ring_head], board, rank.now, self.gaps)
        return self.sketches.sketches(board, rank.now, self.gaps)


def lengths(rank: Rank, name: str) -> list[float]:
    return [(end - start) / S for which, start, end in rank.ended if which == name]


def tail_of(all_s: list[float]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for each in all_s:
        counts[bucket_of(each)] = counts.get(bucket_of(each), 0.0) + 1.0
    return counts


def settled() -> tuple[Rank, Watch]:
    """A rank that is through its first intervals, of 1 s each, 0.5 s apart."""
    rank = Rank()
    for _ in range(FIRST_INTERVALS):
        rank.spend("step", 1.0, before_s=0.5)
    watch = Watch(rank)
    watch.look()
    return rank, watch


def test_sections_that_were_never_opened_have_an_empty_sketch() -> None:
    rank = Rank()
    rank.passes(2)
    found = Watch(rank).look()
    assert found == {
        **{name: Sketch(rank=3) for name in NAMES},
        IDLE: Sketch(rank=3, open_s=2.0),
    }


def test_first_intervals_are_in_no_tail_and_the_longest_is_known() -> None:
    rank = Rank()
    for seconds in (60.0, 2.0, 1.0, 3.0):
        rank.spend("step", seconds, before_s=seconds / 10)
    found = Watch(rank).look()
    assert found["step"] == Sketch(ended=4, longest_s=60.0, first_s=60.0, rank=3)
    assert (found[IDLE].first_s, found[IDLE].tail) == (6.0, ())


def test_intervals_after_the_first_are_in_the_tail() -> None:
    rank, watch = settled()
    for seconds in (2.0, 2.0, 0.25):
        rank.spend("step", seconds, before_s=0.125)
    found = watch.look()
    assert dict(found["step"].tail) == {bucket_of(2.0): 2.0, bucket_of(0.25): 1.0}
    assert (found["step"].ended, found["step"].longest_s, found["step"].first_s) == (7, 2.0, 1.0)
    assert dict(found[IDLE].tail) == {bucket_of(0.125): 3.0}


def test_the_age_of_what_is_open_is_in_the_sketch_and_of_nothing_once_the_rank_ends_its_monitoring() -> None:
    rank, watch = settled()
    rank.start("step")
    rank.passes(7)
    found = watch.look()
    assert (found["step"].open_s, found[IDLE].open_s) == (7.0, NO_INTERVAL)
    rank.end("step")
    rank.passes(3)
    assert (watch.look()["step"].open_s, watch.look()[IDLE].open_s) == (NO_INTERVAL, 3.0)
    rank.changes["closing"] = True
    assert watch.look()[IDLE].open_s == NO_INTERVAL


def test_nested_sections_have_their_own_intervals_and_no_time_out_of_section_between_them() -> None:
    rank, watch = settled()
    rank.start("setup")
    for _ in range(6):
        rank.spend("save", 2.0, before_s=1.0)
        watch.look()
    rank.end("setup")
    found = watch.look()
    assert found["setup"].longest_s == 18.0
    assert dict(found["save"].tail) == {bucket_of(2.0): 2.0}
    assert dict(found[IDLE].tail) == {0: 1.0}, "that before setup"
    rank.passes(4)
    rank.start("step")
    assert dict(watch.look()[IDLE].tail) == {0: 1.0, bucket_of(4.0): 1.0}


def test_a_section_that_is_closed_and_opened_between_two_looks_is_two_intervals() -> None:
    rank, watch = settled()
    rank.start("step")
    rank.passes(2)
    watch.look()
    rank.end("step")
    rank.start("step")
    rank.passes(4)
    assert watch.look()["step"].open_s == 4.0
    rank.end("step")
    assert dict(watch.look()["step"].tail) == {bucket_of(2.0): 1.0, bucket_of(4.0): 1.0}


def test_an_explained_interval_is_in_no_tail_and_the_next_one_is() -> None:
    rank, watch = settled()
    rank.start("step")
    since = rank.now
    rank.passes(30)
    watch.look()
    watch.sketches.explain(IntervalKey(HangKind.SECTION, "step", since), rank.board())
    rank.passes(3)
    rank.end("step")
    rank.spend("step", 2.0)
    found = watch.look()["step"]
    assert (found.explained_s, found.longest_s, dict(found.tail)) == (33.0, 33.0, {bucket_of(2.0): 1.0})


def test_an_explained_time_out_of_section_is_in_no_tail() -> None:
    rank, watch = settled()
    since = rank.now
    rank.passes(30)
    watch.sketches.explain(IntervalKey(HangKind.OUT_OF_SECTION, None, since), rank.board())
    rank.spend("step", 1.0)
    rank.spend("step", 1.0, before_s=2.0)
    found = watch.look()
    assert (found[IDLE].explained_s, dict(found[IDLE].tail)) == (30.0, {bucket_of(2.0): 1.0})
    assert found["step"].explained_s == NO_INTERVAL


def test_an_explained_first_interval_is_a_first_one_too() -> None:
    rank = Rank()
    watch = Watch(rank)
    rank.start("setup")
    watch.sketches.explain(IntervalKey(HangKind.SECTION, "setup", rank.now), rank.board())
    rank.passes(100)
    rank.end("setup")
    found = watch.look()["setup"]
    assert (found.first_s, found.explained_s) == (100.0, 100.0)


def test_a_pause_is_in_no_interval() -> None:
    rank, watch = settled()
    rank.start("step")
    rank.passes(1)
    watch.look()
    watch.gaps.append(Gap(rank.now, rank.now + 3600 * S, 3600 * S, 0))
    rank.passes(3601)
    assert watch.look()["step"].open_s == 2.0
    rank.end("step")
    rank.spend("step", 0.5)
    assert dict(watch.look()["step"].tail) == {bucket_of(2.0): 1.0, bucket_of(0.5): 1.0}


def test_the_first_times_out_of_section_are_those_that_hang_detection_takes_for_first() -> None:
    """It counts how often any section was opened."""
    rank = Rank()
    rank.start("setup")
    for _ in range(FIRST_INTERVALS):
        rank.spend("save", 0.5)
    rank.end("setup")
    rank.spend("step", 1.0, before_s=7.0)
    found = Watch(rank).look()[IDLE]
    assert (found.first_s, dict(found.tail)) == (0.0, {bucket_of(7.0): 1.0})


@pytest.mark.parametrize("seed", range(20))
def test_sketches_of_a_random_rank_hold_all_its_intervals_however_often_it_is_looked_at(seed: int) -> None:
    rng = random.Random(seed)
    rank = Rank()
    watch = Watch(rank)
    for _ in range(400):
        rank.passes(rng.lognormvariate(0, 1))
        name = rng.choice(NAMES)
        (rank.end if name in rank.opened else rank.start)(name)
        if rng.random() < 0.2:
            watch.look()
    found = watch.look()
    for name in NAMES:
        all_s = lengths(rank, name)
        assert found[name].ended == len(all_s)
        assert found[name].longest_s == max(all_s)
        assert found[name].first_s == max(all_s[:FIRST_INTERVALS])
        expected = tail_of(all_s[FIRST_INTERVALS:])
        assert sum(count for _, count in found[name].tail) == sum(expected.values())
        assert found[name].tail[-1] == max(expected.items())
    assert found[IDLE].longest_s == max(lengths(rank, IDLE))


@pytest.mark.parametrize("seed", range(20))
def test_sketch_after_lost_events_invents_no_interval(seed: int) -> None:
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
            real = tail_of(lengths(rank, name))
            for bucket, count in found[name].tail[1:]:
                assert count <= real.get(bucket, 0), (name, bucket)
        for name in NAMES:
            assert found[name].ended == rank.counts[name] - (name in rank.opened)
            assert (found[name].open_s >= 0) == (name in rank.opened)
        assert sum(count for _, count in found["step"].tail) > layout.RING_EVENTS / 4
        assert (found[IDLE].open_s >= 0) == (not rank.opened)


def test_long_open_section_keeps_its_start_across_lost_events() -> None:
    rank, watch = settled()
    rank.counts["setup"] = FIRST_INTERVALS
    rank.start("setup")
    for _ in range(layout.RING_EVENTS):
        rank.spend("step", 0.001, before_s=0.001)
    found = watch.look()
    assert found[IDLE].tail == ()  # it never was out of section
    rank.end("setup")
    total = (2 * layout.RING_EVENTS) * 0.001
    assert dict(watch.look()["setup"].tail) == {bucket_of(total): 1.0}


def test_a_monitor_that_takes_over_counts_from_then_on_and_knows_what_is_open() -> None:
    rank, _ = settled()
    rank.start("step")
    rank.passes(3)
    watch = Watch(rank, takes_over=True)
    assert watch.look()["step"] == Sketch(ended=FIRST_INTERVALS, rank=3, open_s=3.0)
    rank.passes(1)
    rank.end("step")
    rank.spend("step", 2.0, before_s=6.0)
    found = watch.look()
    assert dict(found["step"].tail) == {bucket_of(4.0): 1.0, bucket_of(2.0): 1.0}
    assert dict(found[IDLE].tail) == {bucket_of(6.0): 1.0}
    rank.passes(3)
    watch = Watch(rank, takes_over=True)
    rank.spend("step", 2.0, before_s=1.0)
    assert dict(watch.look()[IDLE].tail) == {bucket_of(4.0): 1.0}


@pytest.mark.parametrize(
    "stray", [(2**63, 0xFFFF << 48), (5, layout.EVENT_END << layout.KIND_SHIFT | 1 << layout.SECTION_SHIFT), (START, 0)]
)
def test_a_stray_write_into_the_ring_counts_for_nothing_and_is_recovered_from(stray: tuple[int, int]) -> None:
    rank, watch = settled()
    rank.start("step")
    rank.passes(2)
    rank.words += stray
    rank.passes(1)
    rank.end("step")  # its start is in doubt
    rank.start("save")
    rank.passes(1)
    watch.look()
    watch.look()
    rank.end("save")
    rank.spend("step", 8.0, before_s=1.0)
    found = watch.look()
    assert dict(found["step"].tail) == {bucket_of(8.0): 1.0}
    assert found["save"].longest_s == 1.0


def test_a_section_that_only_the_board_knows_as_closed_is_closed_at_the_second_look() -> None:
    """A signal handler may have closed it without an event."""
    rank, watch = settled()
    rank.start("step")
    watch.look()
    del rank.opened["step"]
    watch.look()
    rank.passes(5)
    assert watch.look()["step"].open_s == NO_INTERVAL


def test_a_torn_reading_of_the_board_changes_nothing() -> None:
    """The words of sections are read after the ring's head."""
    rank, watch = settled()
    rank.start("step")
    rank.passes(2)
    watch.look()
    rank.changes = {"sections": tuple(SectionView(name, 0, 9, None) for name in NAMES)}
    watch.look()
    rank.changes = {}
    rank.passes(2)
    rank.end("step")
    assert dict(watch.look()["step"].tail) == {bucket_of(4.0): 1.0}


def test_feeding_a_full_ring_is_cheap() -> None:
    rank = Rank()
    for _ in range(layout.RING_EVENTS // 2):
        rank.spend("step", 1.0, before_s=0.5)
    watch = Watch(rank)
    began = time.process_time()
    watch.look()
    assert time.process_time() - began < 0.05, "a monitor has one CPU beside its rank, and looks every few seconds"


# -- milestones ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "reached"), [(9, None), (10, 10), (31, 10), (32, 32), (63, 32), (64, 64), (1000, 512), (2**20, 2**20)]
)
def test_a_milestone_of_steps_is_the_highest_that_is_newly_reached(steps: int, reached: int | None) -> None:
    milestones = Milestones()
    found = milestones.take(BOARD._replace(steps=steps, cycle=4))
    assert found == ([] if reached is None else [Milestone(4, Moment.STEPS, reached)])
    assert milestones.take(BOARD._replace(steps=steps)) == []


def test_iterations_count_as_steps_only_where_no_hooks_count_steps() -> None:
    assert Milestones().take(BOARD._replace(iterations_seen=40)) == [Milestone(0, Moment.STEPS, 32)]
    assert Milestones().take(BOARD._replace(iterations_seen=40, steps=1)) == []
    assert Milestones().take(BOARD._replace(iterations_seen=40, learning_facts=layout.FACT_HOOKS)) == []


def test_milestones_are_each_save_and_the_end_once() -> None:
    milestones = Milestones()
    assert milestones.take(BOARD._replace(saves=2)) == [Milestone(0, Moment.SAVE, 2)]
    assert milestones.take(BOARD._replace(saves=2)) == []
    ending = BOARD._replace(saves=3, learning_facts=layout.FACT_RUN_ENDS)
    assert milestones.take(ending) == [Milestone(0, Moment.SAVE, 3), Milestone(0, Moment.END)]
    assert milestones.take(ending._replace(closing=True)) == []


@pytest.mark.parametrize("more", [{}, {"watch_only": True, "steps": 64, "saves": 1}], ids=["no_end", "no_hooks"])
def test_end_of_the_monitoring_alone_is_no_milestone(more: dict[str, Any]) -> None:
    assert Milestones().take(BOARD._replace(closing=True, **more)) == []


def test_facts_are_those_of_the_board() -> None:
    assert facts_of(BOARD) == Facts()
    said = layout.FACT_LEARNS | layout.FACT_HOOKS | layout.FACT_LOADED | layout.FACT_ENOUGH_STEPS
    shown = BOARD._replace(learning_facts=said | layout.FACT_ASYNC_SAVES, saves=1)
    shown = shown._replace(sections=(SectionView("setup", START, 1, None),))
    assert facts_of(shown) == Facts(
        learns=True, has_hooks=True, loaded=True, setup_open=True, enough_steps=True, saved=True, async_saves=True
    )


def minute_of(rank: Rank, sketches: SectionSketches) -> RankMinute:
    board = rank.board()
    sketches.feed(sketches.read_to, rank.words[2 * sketches.read_to :], board, rank.now)
    record = sketches.take_minute(board, rank.now)
    (row,) = read_rows(json.loads(json.dumps(record.ranks)), record.names)
    assert record.at_ns % MINUTE_NS == 0
    return row


def test_minutes_tell_each_interval_once() -> None:
    """The sums over all minutes are what the cumulative sketch has counted."""
    chance, rank = random.Random(5), Rank()
    sketches = SectionSketches(rank.board())
    minutes = []
    for number in range(200):
        rank.spend("step", chance.uniform(0.4, 0.6), before_s=chance.uniform(0.01, 0.02))
        if number % 50 == 49:
            rank.spend("save", 3.0)
        if number % 37 == 0:
            minutes.append(minute_of(rank, sketches))
    minutes.append(minute_of(rank, sketches))
    whole = sketches.sketches(rank.board(), rank.now)
    for name in ("step", "save", IDLE):
        mine = [minute.sections[name] for minute in minutes if name in minute.sections]
        took_s = [(end - begin) / S for what, begin, end in rank.ended if what == name]
        total = add_up(each.sketch for each in mine)
        assert total.ended == whole[name].ended == len(took_s)
        assert total.longest_s == pytest.approx(max(took_s), abs=1e-4)
        assert total.first_s == pytest.approx(whole[name].first_s, abs=1e-4)
        assert sum(count for _, count in total.tail) == len(took_s) - min(len(took_s), FIRST_INTERVALS)
        assert sum(each.total_s for each in mine) == pytest.approx(sum(took_s), abs=0.01)
    assert minutes[0].from_s == (START % MINUTE_NS) / S


def test_a_minute_tells_where_rare_sections_were_and_what_is_open() -> None:
    rank = Rank()
    sketches = SectionSketches(rank.board())
    for _ in range(MOST_SPANS + 1):
        rank.spend("step", 0.5, before_s=0.25)
    rank.start("setup")
    rank.passes(1.0)
    begun_s = (rank.now % MINUTE_NS) / S
    rank.spend("save", 2.0)
    minute = minute_of(rank, sketches)
    assert minute.sections["save"].spans == ((pytest.approx(begun_s), 2.0),)
    assert minute.sections["save"].depth == 1
    assert minute.sections["step"].spans == ()
    assert minute.sections["setup"].sketch.open_s == pytest.approx(3.0)
    rank.passes(70.0)
    rank.end("setup")
    later = minute_of(rank, sketches)
    assert later.sections["setup"].spans[0][1] == 73.0
    assert later.sections["setup"].spans[0][0] == later.to_s - 73.0 < later.from_s  # it began in the minute before
    assert "step" not in later.sections


def test_a_malformed_row_is_left_out() -> None:
    good = [7, 0, 60, 0, [3, 1.5], [0, 1.0, [2.0, 1.0], 1, 1.0, 0, -1, -1, -1]]
    (read,) = read_rows([good], ["step"])
    assert (read.rank, read.iterations, read.sections["step"].spans) == (7, ((3, 1.5),), ((2.0, 1.0),))
    (counted,) = read_rows([[*good[:5], [0, 1.0, [], 4, 1.0, 0, -1, -1, -1, 5, 1, 2, -3, 1]]], ["step"])
    assert counted.sections["step"].sketch.tail == ((5, 1.0), (6, 2.0), (10, 1.0))
    bad: list[Any] = [
        good[:-1],
        [None, *good[1:]],
        [*good[:4], [3], good[5]],
        [*good[:4], ["x", 1.5], good[5]],
        [*good[:5], [0, 1.0, [2.0], 1, 1.0, 0, -1, -1, -1]],
        [*good[:5], [0, float("nan"), [], 1, 1.0, 0, -1, -1, -1]],
        [*good[:5], [0, 1.0, [], 1, 1.0]],
        [*good[:5], "step"],
        [*good[:5], [0, 1.0, [], 1.0, 1.0, 0, -1, -1, -1]],
        [*good[:5], [0, 1.0, [], True, 1.0, 0, -1, -1, -1]],
        [*good[:5], [0, 1.0, [], 1, -2, 0, -1, -1, -1]],
        [*good[:5], [0, 1.0, [], 1, 1.0, -1, -1, -1, -1]],
        [*good[:5], [0, 1.0, [], 1, 1.0, 0, -1, -1, -1, 0.5, 1]],
        [*good[:5], [0, 1.0, [], 1, 1.0, 0, -1, -1, -1, -1, 1]],
        [*good[:5], [0, 1.0, [], 1, 1.0, 0, -1, -1, -1, 5, 1, -0.5, 1]],
        [*good[:5], [0, 1.0, [], 1, 1.0, 0, -1, -1, -1, 5, *[1] * 17]],
        [*good[:5], [0, 1.0, [], 10**400, float("nan"), 0, -1, -1, -1]],
    ]
    assert list(read_rows([*bad, good], ["step"])) == [read]
