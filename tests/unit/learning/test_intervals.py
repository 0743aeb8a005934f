"""Intervals from a simulated rank's ring events, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from megatron_ft.learning.intervals import BoardIntervals
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
    """Opens and closes sections, and writes what a recorder would; its monitor counts the intervals."""

    def __init__(self) -> None:
        self.now = START
        self.words: list[int] = []
        self.opened: dict[str, int] = {}
        self.transition = START
        self.changes: dict[str, Any] = {}
        self.gaps: list[Gap] = []
        self.lengths: dict[str, list[float]] = {name: [] for name in (*NAMES, IDLE)}
        """Seconds that each interval has taken."""
        self._idle_since = START
        self.intervals = BoardIntervals(self.board())

    def play(self, *acts: float | str) -> None:
        """Let seconds pass, open ("+step") and close sections ("-step")."""
        for act in acts:
            if not isinstance(act, str):
                self.now += round(act * S)
                continue
            name = act[1:]
            if act[0] == "+":
                if not self.opened:
                    self.lengths[IDLE].append((self.now - self._idle_since) / S)
                self.opened[name] = self.now
            else:
                self.lengths[name].append((self.now - self.opened.pop(name)) / S)
                self._idle_since = self.now
            kind = layout.EVENT_START if act[0] == "+" else layout.EVENT_END
            self.write(kind, NAMES.index(name) << layout.SECTION_SHIFT)

    def play_any(self, rng: random.Random, weights: tuple[int, int, int] = (1, 1, 1)) -> None:
        (name,) = rng.choices(NAMES, weights)
        self.play(rng.lognormvariate(0, 1), f"{'-' if name in self.opened else '+'}{name}")

    def write(self, kind: int, value: int = 0) -> None:
        self.transition = self.now
        self.words += (self.now, kind << layout.KIND_SHIFT | value)

    def board(self) -> BoardSnapshot:
        sections = tuple(SectionView(name, self.opened.get(name, 0), 1, None) for name in NAMES)
        board = BOARD._replace(sections=sections, last_transition_ns=self.transition, rank=3)
        return board._replace(ring_head=len(self.words) // 2)._replace(**self.changes)

    def look(self) -> Mapping[str, Observed]:
        board = self.board()
        first = max(self.intervals.read_to, board.ring_head - layout.RING_EVENTS)
        self.intervals.feed(first, self.words[2 * first : 2 * board.ring_head], board, self.now, self.gaps)
        return self.intervals.observed(board, self.now, self.gaps).seen

    def minute(self) -> RankMinute:
        self.look()
        (row,) = self.intervals.take_minute(self.board(), self.now, self.gaps).ranks
        return row


@pytest.mark.parametrize("ends", [{"learning_facts": layout.FACT_RUN_ENDS}, {"closing": True}])
def test_interval_that_is_open_counts_with_its_age_and_that_out_of_section_up_to_the_end_of_the_run(
    ends: dict[str, Any],
) -> None:
    rank = Rank()
    rank.play(2)
    assert rank.look() == {**{name: Observed(rank=3) for name in NAMES}, IDLE: Observed(0, 2.0, 3)}
    rank.play("+step", 7)
    found = rank.look()
    assert (found["step"], found[IDLE]) == (Observed(0, 7.0, 3), Observed(1, 2.0, 3))
    rank.gaps.append(Gap(rank.now, rank.now + 3600 * S, 3600 * S, 0))
    rank.play(3601)
    assert rank.look()["step"] == Observed(0, 8.0, 3), "a pause is in no interval"
    rank.play("-step", 4)
    rank.changes = ends
    assert (rank.look()["step"], rank.look()[IDLE]) == (Observed(1, 8.0, 3), Observed(2, 4.0, 3))
    rank.play(9)
    assert rank.look()[IDLE] == Observed(2, 4.0, 3), "what the rank does afterwards isn't in its run"


@pytest.mark.parametrize("is_overrun", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_intervals_of_a_random_rank_are_all_counted_and_lost_events_invent_none(seed: int, is_overrun: bool) -> None:
    """The ring is overrun between two looks, several times, with sections open across it."""
    rng = random.Random(seed)
    rank = Rank()
    for _ in range(3):
        for _ in range(rng.randrange(layout.RING_EVENTS, 2 * layout.RING_EVENTS) if is_overrun else 100):
            rank.play_any(rng, (1, 1000, 100) if is_overrun else (1, 1, 1))
            if not is_overrun and rng.random() < 0.2:
                rank.look()
        found = rank.look()
        for name, real in rank.lengths.items():
            open_s = (rank.now - rank.opened.get(name, rank.transition)) / S
            assert found[name].count <= len(real)
            assert found[name].longest_s <= max([*real, open_s])
        assert found["step"].count > layout.RING_EVENTS / 4 or not is_overrun
    open_for = {name: (rank.now - since_ns) / S for name, since_ns in rank.opened.items()}
    assert all(found[name].longest_s >= seconds for name, seconds in open_for.items()), "their starts are known"
    rank.play(*(f"-{name}" for name in rank.opened))
    counted = {name: Observed(len(real), max(real), 3) for name, real in rank.lengths.items()}
    assert is_overrun or rank.look() == counted


def test_monitor_that_takes_over_counts_from_then_on_and_knows_what_is_open() -> None:
    rank = Rank()
    rank.play("+step", 9, "-step", "+step", 3)
    rank.intervals = BoardIntervals(rank.board(), from_ring_head=rank.board().ring_head)
    assert rank.look()["step"] == Observed(0, 3.0, 3)
    rank.play(1, "-step", 6, "+step", 2, "-step")
    found = rank.look()
    assert (found["step"], found[IDLE]) == (Observed(2, 4.0, 3), Observed(1, 6.0, 3))
    # a stray event, with a time outside the cycle, begins no interval
    rank.play("+step")
    rank.words[-2] = START - 1
    rank.play(1, "+save", 1, "-step", "-save")
    found = rank.look()
    assert (found["step"].count, found["save"].count, found[IDLE].count) == (2, 1, 1)


def test_section_that_is_closed_without_an_event_ends_the_time_since_then() -> None:
    """A signal handler and a hook have raced: the board is right."""
    rank = Rank()
    rank.play("+step", 5)
    rank.look()
    del rank.opened["step"]
    rank.play(2)
    rank.transition = rank.now
    rank.look()
    rank.play(3, "+save", 1, "-save")
    found = rank.look()
    assert (found["step"].count, found[IDLE].longest_s) == (0, 3.0)


def test_minute_holds_what_has_ended_since_the_last_one_and_what_is_open() -> None:
    rank = Rank()
    rank.now += MINUTE_NS - rank.now % MINUTE_NS
    rank.write(layout.EVENT_ITERATION, 7)
    for _ in range(MOST_SPANS + 1):
        rank.play(0.1, "+step", 0.5, "-step")
        rank.write(layout.EVENT_HEARTBEAT)
        rank.look()
    rank.play("+save", 2, "-save")
    rank.write(layout.EVENT_ITERATION, 9)
    rank.play("+setup", 4)
    minute = rank.minute()
    step, save, setup, idle = (minute.sections[name] for name in ("step", "save", "setup", IDLE))
    assert (step.count, step.longest_s, step.counts, step.spans) == (7, 0.5, {bucket_of(0.5): 7}, [])
    assert (save.spans[0][1], save.total_s, save.open_s) == (2.0, 2.0, -1)
    assert (setup.count, setup.open_s) == (0, 4.0)
    assert idle.count == 9
    assert sum(idle.counts.values()) == idle.count - 4, "the first ones of a cycle are told apart"
    assert minute.sections["heartbeat"].count == MOST_SPANS
    assert [number for number, _ in minute.iterations] == [7, 9]
    rank.play(60, "-setup")
    later = rank.minute()
    assert {name: each.count for name, each in later.sections.items()} == {"setup": 1}
    assert later.sections["setup"].longest_s == 64.0


SAID = layout.FACT_LEARNS | layout.FACT_LOADED


@pytest.mark.parametrize(
    ("changes", "facts", "reached", "ended"),
    [
        ({"learning_facts": SAID, "steps": 31}, SAID, (0, 0), False),
        ({"learning_facts": SAID, "steps": 32, "saves": 2}, SAID | FACT_SAVED, (2, 32), False),
        ({"sections": (SectionView("setup", START, 1, None),), "steps": 200}, FACT_SETUP_OPEN, (0, 128), False),
        ({"sections": (SectionView("setup", 0, 1, None),), "iterations_seen": 64}, 0, (0, 64), False),  # without hooks
        ({"learning_facts": layout.FACT_RUN_ENDS}, layout.FACT_RUN_ENDS, (0, 0), True),
        ({"closing": True}, 0, (0, 0), False),  # it has only ended its monitoring
    ],
)
def test_facts_and_milestones_are_those_of_the_board(
    changes: dict[str, Any], facts: int, reached: tuple[int, int], ended: bool
) -> None:
    board = BOARD._replace(**changes)
    found = BoardIntervals(board).observed(board, START)
    assert (found.facts, found.reached, found.ended) == (facts, reached, ended)
