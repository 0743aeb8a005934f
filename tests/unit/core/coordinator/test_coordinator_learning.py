"""Surveys of the coordinator: when they begin and end, what they learn, and what a bad launcher can't do to them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from megatron_ft.core.board import layout
from megatron_ft.core.codec import Vocabulary
from megatron_ft.core.coordinator.coordinator import Coordinator
from megatron_ft.core.coordinator.learning import BETWEEN_S, SURVEY_S, CycleLearning, SurveyLog, find_unopened
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.facts.launcher import Cause, CauseKind
from megatron_ft.core.job import edge
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.restart_policy import NodeState
from megatron_ft.core.timeouts.exchange import Facts, Intervals, Learned, Milestone, Moment, Raised, Survey
from megatron_ft.core.timeouts.sketch import MOST_BUCKETS, MOST_NAMES, Sketch, is_name
from tests.support.arrived import arrived
from tests.support.job_machines import answers, begun, links
from tests.support.machines import Job

CYCLE = 3
READY = Facts(learns=True, has_hooks=True, loaded=True, enough_steps=True, saved=True)


class Surveyed:
    """One cycle of ``nodes`` nodes; the connection of each is 100 and its place."""

    def __init__(self, nodes: int = 2, log: SurveyLog | None = None) -> None:
        self.machine = CycleLearning(CYCLE, log or SurveyLog())
        self.now_s = 0.0
        self.links = {place: 100 + place for place in range(nodes)}
        self.sent: list[edge.Send] = []

    def take(self, after_s: float = 0.0) -> None:
        """Let time pass."""
        self.now_s += after_s
        self.sent += self.machine.take(self.now_s, lambda: self.links, lambda: self.links)

    def reached(self, moment: Moment, count: int = 0, *, place: int = 0) -> None:
        """A node has told of a milestone."""
        self.machine.reached(place, Milestone(CYCLE, moment, count))
        self.take()

    def ends(self) -> None:
        """The runs of all nodes are over."""
        for place in self.links:
            self.reached(Moment.END, place=place)

    def answers(self, place: int, length_s: float = 1.0, *, number: int | None = None, **more: object) -> None:
        """A node answers the last survey."""
        number = self.surveys[-1].number if number is None else number
        sketch = Sketch(ended=100, longest_s=length_s, rank=place, tail=((80, 100.0),))
        sketches = dict.fromkeys(("setup", "step", "checkpointing", "out_of_section"), sketch)
        fields: dict[str, object] = {"known": {} if place == 0 else None, "facts": READY, "sketches": sketches, **more}
        self.machine.answered(place, Intervals(CYCLE, number, **fields))  # type: ignore[arg-type]
        self.take()

    @property
    def surveys(self) -> list[Survey]:
        """All that were begun."""
        return [each.message for each in self.sent if isinstance(each.message, Survey)]

    @property
    def learned(self) -> list[Learned]:
        """All results."""
        return [each.message for each in self.sent if isinstance(each.message, Learned)]


def test_survey_of_the_end_waits_for_all_nodes_whose_ranks_run() -> None:
    job = Surveyed(3)
    job.reached(Moment.END, place=1)
    job.reached(Moment.END, place=1)
    job.reached(Moment.END, place=0)
    assert job.surveys == []
    job.reached(Moment.END, place=2)
    job.reached(Moment.END, place=2)
    assert [survey.moment for survey in job.surveys] == [Moment.END]


def test_script_without_hooks_is_told_how_it_can_learn() -> None:
    job = Surveyed()
    job.reached(Moment.STEPS, 10)
    for place in range(2):
        job.answers(place, facts=Facts(), mode="on")
    (learned,) = job.learned
    assert learned.timeouts == {}
    assert [reason for reason in learned.reasons if "RankMonitorClient" in reason]


def test_first_report_of_each_milestone_starts_one_survey_of_all_nodes() -> None:
    job = Surveyed()
    for count, surveys in [(10, 1), (10, 1), (9, 1)]:
        job.reached(Moment.STEPS, count)
        assert len(job.surveys) == surveys
    assert job.sent == [edge.Send([100, 101], Survey(CYCLE, 1, Moment.STEPS))]


def test_survey_ends_with_the_last_answer_and_learns_from_all() -> None:
    job = Surveyed()
    job.reached(Moment.SAVE, 1)
    job.answers(0, 1.5)
    assert job.learned == []
    job.answers(1, 4.0)
    (learned,) = job.learned
    assert (learned.enforces, learned.writes, learned.moment) == (True, True, Moment.SAVE)
    assert learned.timeouts.keys() == learned.known.keys() == {"setup", "step", "checkpointing"}
    assert (learned.timeouts["step"].max_observed_s, learned.timeouts["step"].rank_of_max) == (4.0, 1)
    assert job.sent[-1].links == [100, 101]


def test_milestone_of_another_cycle_starts_no_survey() -> None:
    job = Surveyed()
    assert not job.machine.reached(0, Milestone(CYCLE - 1, Moment.SAVE, 1))
    job.take()
    assert job.surveys == []


def test_node_that_has_seen_more_long_intervals_counts_though_none_was_longer() -> None:
    totals = []
    for count in (100.0, 200.0):
        job = Surveyed()
        job.reached(Moment.SAVE, 1)
        job.answers(0)
        sketch = Sketch(ended=100, longest_s=1.0, rank=0, tail=((80, count),))
        job.answers(1, sketches=dict.fromkeys(("setup", "step", "checkpointing"), sketch))
        totals.append(sum(each for _, each in job.learned[0].known["step"].now.tail))
    assert totals == [100.0, 200.0]


def test_timeout_out_of_section_is_learned_at_the_end() -> None:
    job = Surveyed(1)
    job.ends()
    job.answers(0)
    assert "out_of_section" in job.learned[0].timeouts


def test_survey_ends_after_two_seconds_without_the_nodes_that_have_not_answered() -> None:
    job = Surveyed()
    job.reached(Moment.SAVE, 1)
    job.answers(0, 1.5)
    assert job.machine.alarm_s == SURVEY_S
    job.take(SURVEY_S - 0.01)
    assert job.learned == []
    job.take(0.01)
    assert job.learned[0].timeouts["step"].max_observed_s == 1.5
    job.answers(1, 9.0)
    assert len(job.learned) == 1


def test_lost_node_does_not_hold_up_a_survey() -> None:
    job = Surveyed()
    job.reached(Moment.SAVE, 1)
    job.answers(0)
    job.machine.lost(1)
    job.take()
    assert len(job.learned) == 1


@pytest.mark.parametrize("known", [None, "late"])
def test_survey_without_the_knowledge_of_place_0_learns_nothing(known: str | None) -> None:
    job = Surveyed()
    job.reached(Moment.SAVE, 1)
    job.answers(1)
    if known is None:
        job.answers(0, known=None)
    else:
        job.take(SURVEY_S)
    assert job.learned == [Learned(CYCLE, 1, Moment.SAVE)]


def test_milestone_during_a_survey_starts_the_next_one_a_second_after_it() -> None:
    job = Surveyed(1)
    job.reached(Moment.SAVE, 1)
    job.reached(Moment.SAVE, 2)
    job.answers(0)
    assert [survey.number for survey in job.surveys] == [1]
    assert job.machine.alarm_s == BETWEEN_S
    job.take(BETWEEN_S)
    assert [survey.number for survey in job.surveys] == [1, 2]


def test_end_of_the_run_is_surveyed_at_once_and_is_not_displaced_by_a_save() -> None:
    job = Surveyed(1)
    job.reached(Moment.SAVE, 1)
    job.ends()
    job.reached(Moment.SAVE, 2)
    job.answers(0)
    assert [survey.moment for survey in job.surveys] == [Moment.SAVE, Moment.END]


def test_answers_that_were_not_asked_for_are_ignored() -> None:
    job = Surveyed()
    job.machine.answered(0, Intervals(CYCLE, 0, known={}))
    job.reached(Moment.SAVE, 1)
    job.answers(1, 2.0)
    job.answers(1, 90.0)  # twice
    job.answers(7, 91.0)  # no such place
    job.answers(0, 92.0, number=9)
    sketches = {"step": Sketch(ended=1, longest_s=93.0)}
    job.machine.answered(0, Intervals(CYCLE - 1, 1, sketches, known={}, facts=READY))
    job.take()
    assert job.learned == []
    job.answers(0, 1.0)
    assert job.learned[0].timeouts["step"].max_observed_s == 2.0


def test_sections_with_a_configured_timeout_are_not_learned_under_report() -> None:
    job = Surveyed(1)
    job.reached(Moment.STEPS, 32)
    job.answers(0, facts=replace(READY, learns=False), caps={"step": 9.0}, mode="report")
    (learned,) = job.learned
    assert learned.timeouts.keys() == {"setup", "checkpointing"}
    assert (learned.enforces, learned.writes, learned.reasons) == (False, False, ())


def test_numbers_of_steps_start_no_survey_where_timeouts_are_enforced() -> None:
    job = Surveyed(1)
    job.reached(Moment.STEPS, 10)
    job.answers(0)
    assert job.learned[0].timeouts == {}
    job.take(5.0)
    job.reached(Moment.STEPS, 32)
    assert len(job.surveys) == 1
    job.reached(Moment.SAVE, 1)
    assert len(job.surveys) == 2


@pytest.mark.parametrize(("configured", "found"), [("stpe", {"stpe": "step"}), ("io", {"io": ""})])
def test_section_that_no_rank_has_opened_is_named_with_the_one_meant(configured: str, found: dict[str, str]) -> None:
    log = SurveyLog()
    job = Surveyed(2, log)
    step = Sketch(ended=10, longest_s=1.0)
    job.reached(Moment.STEPS, 10)
    job.answers(1, sketches={"step": step, configured: Sketch()})
    job.answers(0, sketches={"setup": step}, configured=(configured, "step", "checkpointing", "warmup", "setup"))
    assert job.learned[0].unopened == found
    again = Surveyed(1, log)
    again.ends()
    again.answers(0, sketches={"setup": step}, configured=(configured,))
    assert again.learned[0].unopened == {}


def test_section_that_is_open_for_the_first_time_counts_as_opened() -> None:
    job = Surveyed(1)
    job.reached(Moment.STEPS, 10)
    job.answers(0, sketches={"evaluate": Sketch(open_s=0.5)}, configured=("evaluate",))
    assert job.learned[0].unopened == {}


def test_misspelt_checkpointing_is_named() -> None:
    assert find_unopened(["checkpoint"], opened=["step"]) == {"checkpoint": "checkpointing"}


def test_number_of_sections_is_bounded_whatever_launchers_send() -> None:
    job = Surveyed(4)
    job.reached(Moment.SAVE, 1)
    for place in range(4):
        job.answers(place, sketches={f"{place}-{number}": Sketch(ended=1) for number in range(MOST_NAMES)})
        survey = job.machine._survey
        assert survey is None or len(survey.merged) <= MOST_NAMES
    known = {f"{number}": 1.0 for number in range(MOST_NAMES + 1)}
    job = Surveyed(1)
    job.reached(Moment.SAVE, 1)
    job.answers(0, previous=known)
    assert job.learned == [Learned(CYCLE, 1, Moment.SAVE)]


@pytest.mark.parametrize(
    "sketches",
    [
        {f"{number}": [1, 1, 1, 1, 1, 1] for number in range(MOST_NAMES + 1)},
        {"": [1, 1, 1, 1, 1, 1]},
        {"x" * 64: [1, 1, 1, 1, 1, 1]},
        {"step": [1, 1, 1, 1, 1, 1, 5]},
        {"step": [1, 1, 1, 1, 1, 1, *[1, 1] * (MOST_BUCKETS + 1)]},
        {"step": [1, 1, 1, 1, 1, 1, 5, -1]},
        {"step": [1, 1, 1, 1, 1, 1, 5, 1, 0, 1]},
        {"step": [1.5, 1, 1, 1, 1, 1]},
        {"step": [True, 1, 1, 1, 1, 1]},
        {"step": [1, float("nan"), 1, 1, 1, 1]},
        {"step": [1, 1e300, 1, 1, 1, 1]},
        {"step": [1, -2, 1, 1, 1, 1]},
        {"step": "1"},
        [],
    ],
)
def test_sketches_that_no_launcher_sends_break_the_protocol(sketches: object) -> None:
    messages: Vocabulary[Intervals] = Vocabulary(Intervals)
    with pytest.raises(ProtocolError):
        messages.parse(arrived({"type": "intervals", "cycle": 0, "number": 1, "sketches": sketches}))


def test_sketches_survive_the_wire() -> None:
    messages: Vocabulary[Intervals] = Vocabulary(Intervals)
    sketch = Sketch(ended=7, longest_s=1.5, rank=3, first_s=2.25, open_s=0.0625, tail=((3, 1.5), (200, 2.0)))
    sent = Intervals(1, 2, {"step": sketch, "io": Sketch()}, READY)
    assert messages.parse(arrived(sent)) == sent


def test_a_message_has_room_for_all_names_of_a_board() -> None:
    assert MOST_NAMES == layout.MAX_SECTIONS + 3
    assert is_name("x" * (layout.NAME_BYTES - 1))
    assert not is_name("x" * layout.NAME_BYTES)


def test_kills_are_told_once_each_and_their_number_is_bounded() -> None:
    machine = CycleLearning(CYCLE, SurveyLog())
    assert [machine.raised(Raised(CYCLE, name)) for name in ("step", "step", "setup")] == [True, False, True]
    assert not machine.raised(Raised(CYCLE - 1, "io"))
    assert not machine.raised(Raised(CYCLE, "x" * 64))
    assert sum(machine.raised(Raised(CYCLE, f"{number}")) for number in range(1000)) == MOST_NAMES - 2


def running(names: str) -> Coordinator:
    return begun(m.Rules(min_nodes=len(names), max_nodes=len(names), max_restarts=3), names)


def say(machine: Coordinator, link: int, message: m.FromMember) -> list[edge.CoordinatorEffect]:
    return machine.handle(edge.Heard(link, message), 0.0)


def test_kill_is_relayed_to_all_other_nodes_also_after_the_end_of_the_cycle() -> None:
    machine = running("abc")
    assert links(say(machine, 1, Raised(0, "step")), Raised) == [0, 2]
    assert links(say(machine, 2, Raised(0, "step")), Raised) == []
    say(machine, 1, m.Report(0, NodeState.UNHEALTHY, Cause(text="rank 1 hung", kind=CauseKind.HANG, rank=1)))
    assert links(machine.settle(0.0), m.End) == [0, 1, 2]
    assert links(say(machine, 1, Raised(0, "setup")), Raised) == [0, 2]


def test_survey_runs_through_the_coordinator() -> None:
    machine = running("ab")
    say(machine, 1, Milestone(0, Moment.SAVE, 1))
    assert links(machine.settle(0.0), Survey) == [0, 1]
    for link in (0, 1):
        say(machine, link, Intervals(0, 1, known={}))
    assert links(machine.settle(0.0), Learned) == [0, 1]


def test_kill_that_no_coordinator_could_be_told_of_reaches_the_others_through_the_next_one() -> None:
    job = Job(min_nodes=3)
    _, b, c = job.start("abc")
    job.run(0.5)
    job.break_off(b)
    b.do(b.member.broken(job.now_s))
    b.do(b.member.tell(Raised(0, "step"), job.now_s))
    job.take_over()
    for launcher in (c, *job.launchers[:2]):
        if launcher.link is not None:
            job.break_off(launcher)
            launcher.do(launcher.member.broken(job.now_s))
    job.run(3.0)
    assert [launcher.member.standing.raised for launcher in job.launchers] == [("step",)] * 3


def test_answers_of_ten_thousand_nodes_cost_less_than_a_millisecond_each() -> None:
    job = Surveyed(10_000)
    job.reached(Moment.SAVE, 1)
    messages: Vocabulary[Intervals] = Vocabulary(Intervals)
    bodies = [arrived(_answer(place)) for place in range(100)]
    began_s = time.process_time()
    for place in range(10_000):
        job.machine.answered(place, messages.parse(bodies[place % 100]))
    parsed_s = time.process_time() - began_s
    job.take()
    assert len(job.learned) == 1
    assert parsed_s < 5.0  # 0.6 s on a free core


def _answer(place: int, names: Sequence[str] = ("setup", "step", "checkpointing", "out_of_section")) -> Intervals:
    tail = tuple((60 + bucket, 100.0 + (place * 7 + bucket) % 13) for bucket in range(MOST_BUCKETS))
    sketch = Sketch(ended=1000 + place % 3, longest_s=5.0 + place / 1000, rank=place, first_s=9.5, tail=tail)
    return Intervals(CYCLE, 1, dict.fromkeys(names, sketch), READY, known={} if place == 0 else None)


def test_new_coordinator_that_takes_a_job_over_answers_the_next_milestone() -> None:
    machine = running("ab")
    say(machine, 1, Milestone(0, Moment.SAVE, 1))
    machine.settle(0.0)
    other = running("ab")
    say(other, 0, Intervals(0, 1, known={}))  # for the one before
    assert links(other.settle(0.0), Learned) == []
    say(other, 1, Milestone(0, Moment.SAVE, 2))
    assert links(answers(other, other.settle(0.0)), Survey) == [0, 1]
