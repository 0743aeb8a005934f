"""Surveys of the leader's part: when they begin and end, and what all nodes hear."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.ipc.wire import encode
from megatron_ft.learning.leader_part import BETWEEN_S, SURVEY_S, LeaderLearning
from megatron_ft.learning.messages import (
    MOST_NAMES,
    Facts,
    Intervals,
    Killed,
    Milestone,
    Moment,
    Observed,
    Survey,
    merge,
)

CYCLE = 3


class Job:
    """One cycle of ``nodes`` nodes."""

    def __init__(self, nodes: int = 2) -> None:
        self.part = LeaderLearning(CYCLE)
        self.now_s = 0.0
        self.places = set(range(nodes))
        self.healthy = set(range(nodes))
        self.sent: list[Survey | Intervals] = []

    def tick(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.sent += self.part.tick(self.now_s, lambda: self.places, lambda: self.healthy)

    def reached(self, moment: Moment, count: int = 0, *, place: int = 0) -> None:
        assert self.part.hear(place, Milestone(CYCLE, moment, count)) is None
        self.tick()

    def answers(self, place: int, length_s: float = 1.0, *, number: int | None = None, cycle: int = CYCLE) -> None:
        number = self.surveys[-1].number if number is None else number
        seen = {"step": Observed(10 + place, length_s, place)}
        self.part.hear(place, Intervals(cycle, number, seen=seen, facts=Facts(saved=place == 1)))
        self.tick()

    @property
    def surveys(self) -> list[Survey]:
        return [each for each in self.sent if isinstance(each, Survey)]

    @property
    def results(self) -> list[Intervals]:
        return [each for each in self.sent if isinstance(each, Intervals)]


def test_first_report_of_each_milestone_starts_one_survey() -> None:
    job = Job()
    for count, surveys in [(10, 1), (10, 1), (9, 1)]:
        job.reached(Moment.STEPS, count)
        assert len(job.surveys) == surveys
    assert job.sent == [Survey(CYCLE, 1, Moment.STEPS)]
    job.part.hear(0, Milestone(CYCLE - 1, Moment.SAVE, 1))
    job.tick(100)
    assert len(job.surveys) == 1


def test_survey_ends_with_the_last_answer_in_one_message_of_maxima() -> None:
    job = Job()
    job.reached(Moment.SAVE, 1)
    job.answers(0, 4.0)
    job.answers(0, 9.0)  # it has answered
    job.answers(1, 1.5, number=7)
    job.answers(1, 1.5, cycle=CYCLE + 1)
    assert job.results == []
    job.answers(1, 1.5)
    assert job.results == [Intervals(CYCLE, 1, Moment.SAVE, {"step": Observed(11, 4.0, 0)}, Facts(saved=True))]


@pytest.mark.parametrize("end", ["silent", "lost"])
def test_survey_ends_without_a_node_that_does_not_answer(end: str) -> None:
    job = Job()
    job.reached(Moment.SAVE, 1)
    job.answers(0)
    assert job.part.due_s == SURVEY_S
    if end == "lost":
        job.part.lost(1)
        job.tick()
    else:
        job.tick(SURVEY_S)
    assert len(job.results) == 1
    job.answers(1)
    assert len(job.results) == 1


def test_next_survey_waits_a_second_unless_the_run_ends() -> None:
    job = Job(1)
    job.reached(Moment.STEPS, 10)
    job.answers(0)
    job.reached(Moment.STEPS, 32)
    job.reached(Moment.SAVE, 1)
    assert (len(job.surveys), job.part.due_s) == (1, BETWEEN_S)
    job.tick(BETWEEN_S)
    assert [each.moment for each in job.surveys] == [Moment.STEPS, Moment.SAVE], "a save says more than steps"
    job.answers(0)
    job.reached(Moment.END)
    assert job.surveys[-1].moment is Moment.END


def test_survey_of_the_end_waits_for_all_nodes_whose_ranks_ran_at_its_first_report() -> None:
    job = Job(4)
    job.healthy = {0, 1, 2}
    job.reached(Moment.END, place=1)
    job.reached(Moment.END, place=0)
    job.healthy = {0, 1}  # a node that has failed never ends its run
    job.tick()
    assert job.surveys == []
    job.reached(Moment.END, place=2)
    job.reached(Moment.END, place=2)
    assert [survey.moment for survey in job.surveys] == [Moment.END]


def test_kill_is_told_to_the_others_once() -> None:
    part = LeaderLearning(CYCLE)
    assert part.hear(0, Killed(CYCLE, "step", moved=True)) == Killed(CYCLE, "step", moved=True)
    assert part.hear(1, Killed(CYCLE, "step")) is None
    assert part.hear(1, Killed(CYCLE - 1, "setup")) is None
    told = [part.hear(1, Killed(CYCLE, f"s{number}")) for number in range(2 * MOST_NAMES)]
    assert sum(each is not None for each in told) == MOST_NAMES - 1


def test_next_cycle_begins_with_nothing_and_counts_surveys_on() -> None:
    job = Job(1)
    job.reached(Moment.SAVE, 1)
    job.part = job.part.begin(CYCLE + 1)
    assert job.part.tick(0.0, lambda: {0}, lambda: {0}) == []
    job.part.hear(0, Milestone(CYCLE + 1, Moment.SAVE, 1))
    assert job.part.tick(0.0, lambda: {0}, lambda: {0}) == [Survey(CYCLE + 1, 2, Moment.SAVE)]


observed = st.builds(Observed, st.integers(0, 99), st.floats(0, 1e6), st.integers(0, 9))
answers = st.lists(
    st.builds(
        Intervals,
        st.just(CYCLE),
        st.just(1),
        seen=st.dictionaries(st.sampled_from(["setup", "step", "save"]), observed),
        facts=st.builds(Facts, st.booleans(), st.booleans(), st.booleans()),
    ),
    max_size=5,
)


@given(answers, st.randoms())
def test_merge_is_the_maximum_in_whatever_order_answers_come(given: list[Intervals], chance: random.Random) -> None:
    survey = Survey(CYCLE, 1, Moment.SAVE)
    whole = merge(survey, given)
    shuffled = chance.sample(given, len(given))
    assert merge(survey, [merge(survey, shuffled[:2]), *shuffled, whole]) == whole
    for name, found in whole.seen.items():
        each = [answer.seen[name] for answer in given if name in answer.seen]
        assert (found.count, found.longest_s) == (max(e.count for e in each), max(e.longest_s for e in each))
        assert found.rank == min(e.rank for e in each if e.longest_s == found.longest_s)


def test_bad_answers_do_not_make_the_result_grow() -> None:
    names = [*(f"section {number}" for number in range(500)), "x" * 1000]
    survey = Survey(CYCLE, 1)
    seen = Observed(2**40, 123456.789, 10**6)
    whole = merge(survey, [Intervals(CYCLE, 1, seen={name: seen}) for name in reversed(names)])
    assert len(whole.seen) == MOST_NAMES
    assert len(json.dumps(sorted(whole.seen))) < 4096
    assert len(encode(whole)) < 16_384
