"""Learned timeouts on one node: what is read, armed, surveyed, said, doubled and written."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.core.agent import edge
from megatron_ft.core.agent.learning import ANSWER_NS, READ_NS
from megatron_ft.core.board.layout import STATE_NOT_WRITTEN, STATE_WRITTEN
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.messages import Reviewed
from megatron_ft.core.messages.monitor import Release
from megatron_ft.core.timeouts import budget_rule
from megatron_ft.core.timeouts.exchange import (
    Arm,
    Armed,
    Facts,
    Intervals,
    Learned,
    LearnedTimeout,
    Milestone,
    Moment,
    Raised,
    Survey,
)
from megatron_ft.core.timeouts.known import Known
from megatron_ft.core.timeouts.learned import LearnedState
from megatron_ft.core.timeouts.sketch import Sketch
from tests.support.agents import Driven, found_hung, hung, verdict
from tests.support.agents import attached as rank_attached

PATH = "/ckpt/ft_state.json"
HANG = hung(elapsed_s=6.1, timeout_s=5.0, iteration=60, learned=True)
REVIEW = Reviewed(
    cycle=0, asker=0, text="x", elapsed_s=6.1, timeout_s=5.0, rank=0, is_waited=True, timed="step", iteration=60
)
KNOWN = budget_rule.after_update(Known(), Sketch(ended=100, longest_s=1.0, tail=((80, 100.0),)), factor=5.0)
NOT_WRITTEN = "timeouts learned in this run are not written"


def timeout(seconds: float, **more: object) -> LearnedTimeout:
    """A learned timeout."""
    fields: dict[str, object] = {"timeout_s": seconds, "first_s": 3 * seconds, "limit_s": 4 * seconds, **more}
    return LearnedTimeout(**fields)  # type: ignore[arg-type]


def result(cycle: int = 0, moment: Moment = Moment.SAVE, **more: object) -> Learned:
    """Result of a survey in a job whose script asks for learned timeouts."""
    fields: dict[str, object] = {"enforces": True, "writes": True, **more}
    return Learned(cycle, 1, moment, **fields)  # type: ignore[arg-type]


def state(**sections: float) -> LearnedState:
    """Content of a file."""
    return LearnedState(sections={name: timeout(seconds) for name, seconds in sections.items()})


def attached(*, learns: bool = True, path: str = PATH, place: int = 0, nodes: int = 1, **options: object) -> Driven:
    """Two ranks, whose scripts use the hooks of a train loop."""
    driven = Driven(**options)
    driven.run(place=place, nodes=nodes)
    for local_rank in range(2):
        driven.hear(rank_attached(local_rank, 0, driven.now_ns, state_path=path, learns=learns))
    return driven


def next_cycle(driven: Driven, cycle: int) -> None:
    """The ranks of the last cycle have ended, and others are started."""
    driven.exits(0, 7)
    driven.exits(1, -15, sent=(15,))
    driven.ends()
    driven.hear(edge.RanksEnded(), verdict(cycle - 1, node=0, rank=0, text="rank 0 hung"))
    driven.run(cycle=cycle)


def arms(driven: Driven) -> dict[int, dict[str, Armed]]:
    """By local rank, the timeouts that its monitor was armed with last."""
    return {effect.local_rank: dict(effect.order.timeouts) for effect in driven.orders(Arm)}


def factors(driven: Driven) -> dict[str, float]:
    """How much the last order raises timeouts that clients have calculated."""
    return dict(driven.orders(Arm)[-1].order.raised)


# -- the file ---------------------------------------------------------------------------------------------------


def test_file_is_read_once_per_node_and_arms_all_ranks() -> None:
    driven = attached()
    assert driven.all_of(edge.ReadState) == [edge.ReadState(PATH, sets_aside=True)]
    assert arms(driven) == {}
    driven.hear(edge.StateRead(PATH, state(step=12.0, setup=300.0)))
    assert {rank: armed["step"].timeout_s for rank, armed in arms(driven).items()} == {0: 12.0, 1: 12.0}
    assert arms(driven)[0]["step"].enforced
    assert driven.said[-1] == f"timeouts loaded from {PATH}: step 12 s, setup 300 s"


def test_rank_that_attaches_later_is_armed_at_once() -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, state(step=12.0)))
    driven.done.clear()
    driven.hear(rank_attached(1, 0, None, state_path=PATH))  # its monitor was replaced
    assert arms(driven).keys() == {1}


def test_first_of_several_paths_counts() -> None:
    driven = attached()
    driven.hear(rank_attached(1, 0, driven.now_ns, state_path="/other.json"))
    assert len(driven.all_of(edge.ReadState)) == 1
    assert driven.said[-1].startswith("rank 10 names /other.json")
    driven.hear(rank_attached(1, 0, driven.now_ns, state_path="/other.json"))
    assert sum("/other.json" in line for line in driven.said) == 1


def test_file_system_that_does_not_answer_is_given_up_after_30_seconds() -> None:
    driven = attached()
    driven.wait(READ_NS / 1e9 + 0.1)
    assert driven.said[-1] == f"{PATH}: the file system has not answered for 30 s"
    driven.hear(edge.StateRead(PATH, state(step=12.0)))
    assert arms(driven) == {}


@pytest.mark.parametrize(("may_write", "is_written"), [(True, True), (False, False)])
def test_learned_timeouts_are_written_unless_the_file_may_not_be_touched(may_write: bool, is_written: bool) -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, None, "" if may_write else NOT_WRITTEN, may_write))
    driven.hear(result(timeouts={"step": timeout(7.0)}))
    assert bool(driven.all_of(edge.WriteState)) is is_written
    assert arms(driven)[0]["step"].timeout_s == 7.0


def test_timeouts_file_is_written_by_the_launcher_at_place_0_only() -> None:
    driven = attached(place=1, nodes=2)
    driven.hear(edge.StateRead(PATH, None))
    driven.hear(result(timeouts={"step": timeout(7.0)}))
    assert driven.all_of(edge.WriteState) == []
    assert driven.all_of(edge.TellStateWritten) == []


@pytest.mark.parametrize(("ok", "value"), [(True, STATE_WRITTEN), (False, STATE_NOT_WRITTEN)])
def test_ranks_are_told_at_the_end_what_became_of_the_file(ok: bool, value: int) -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, None))
    driven.hear(result(moment=Moment.END, timeouts={"step": timeout(7.0)}))
    assert driven.all_of(edge.TellStateWritten) == []
    problem = "" if ok else "learned timeouts can't be written to /ckpt: Read-only file system"
    for _ in range(2):
        driven.hear(edge.StateWritten(ok, problem, Moment.END))
    assert driven.all_of(edge.TellStateWritten)[0] == edge.TellStateWritten(value)
    assert driven.said.count(problem) == (not ok)


def test_ranks_are_told_at_once_that_nothing_is_written_at_the_end() -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, None))
    driven.hear(result(moment=Moment.END, writes=False))
    assert driven.all_of(edge.TellStateWritten) == [edge.TellStateWritten(STATE_NOT_WRITTEN)]


# -- milestones and surveys -------------------------------------------------------------------------------------


def test_milestones_are_passed_on_once_per_node() -> None:
    driven = attached()
    for local_rank, count in [(0, 10), (1, 10), (1, 32), (0, 32)]:
        driven.hear(edge.MonitorReport(local_rank, Milestone(0, Moment.STEPS, count)))
    for local_rank in range(2):
        driven.hear(edge.MonitorReport(local_rank, Milestone(0, Moment.END)))
    told = [said for said in driven.told if isinstance(said, Milestone)]
    assert [(each.moment, each.count) for each in told] == [(Moment.STEPS, 10), (Moment.STEPS, 32), (Moment.END, 0)]


def ends(driven: Driven) -> list[Milestone]:
    """Told ends of the run of this node."""
    return [said for said in driven.told if isinstance(said, Milestone) and said.moment is Moment.END]


def test_end_of_the_run_is_told_when_no_rank_is_in_it_any_more() -> None:
    driven = attached()
    driven.hear(edge.MonitorReport(1, Milestone(0, Moment.END)))
    assert ends(driven) == []
    driven.exits(0, 0)
    assert ends(driven) == [Milestone(0, Moment.END)]


def test_timeouts_learned_at_the_end_of_a_run_are_written_and_not_armed_in_it() -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, state(step=5.0)))
    armed = len(driven.orders(Arm))
    driven.hear(result(moment=Moment.END, timeouts={"out_of_section": timeout(5.0)}))
    assert len(driven.orders(Arm)) == armed
    assert "out_of_section" in driven.all_of(edge.WriteState)[-1].state.timeouts
    driven.hear(found_hung(0, 0, HANG))
    assert len(driven.orders(Arm)) == armed
    next_cycle(driven, 1)
    driven.hear(rank_attached(0, 1, driven.now_ns, state_path=PATH, learns=True))
    assert arms(driven)[0]["out_of_section"].timeout_s == 5.0


def test_timeout_that_is_only_reported_is_doubled_once_it_was_exceeded() -> None:
    driven = attached(learns=False)
    driven.hear(edge.StateRead(PATH, None))
    learned = {"step": timeout(5.0)}
    driven.hear(result(moment=Moment.STEPS, enforces=False, writes=False, timeouts=learned, known={"step": KNOWN}))
    for iteration, expected_s in [(60, 10.0), (61, 20.0), (61, 20.0)]:
        driven.hear(replace(REVIEW, rank=None, is_waited=False, iteration=iteration))
        assert arms(driven)[0]["step"].timeout_s == expected_s
        assert not arms(driven)[0]["step"].enforced
    assert len([line for line in driven.said if line.startswith("would be a hang")]) == 2
    assert driven.all_of(edge.WriteState) == []


def answers(driven: Driven) -> list[Intervals]:
    """Answers to surveys."""
    return [said for said in driven.told if isinstance(said, Intervals)]


def intervals(length_s: float, number: int = 1, **facts: bool) -> Intervals:
    """What a monitor reports."""
    return Intervals(0, number, {"step": Sketch(ended=9, longest_s=length_s, open_s=0.1)}, Facts(**facts))


def test_survey_is_answered_when_all_ranks_have_answered() -> None:
    sections = {"step": 20.0, "io": None}
    configured = {"rank_section_timeouts": sections, "rank_out_of_section_timeout": 60.0}
    driven = attached(configured=configured, safety_factor=3.0, learn="on")
    driven.hear(edge.StateRead(PATH, state(step=12.0)))
    driven.hear(Survey(0, 1))
    assert driven.orders(Survey) == [edge.OrderMonitor(rank, Survey(0, 1)) for rank in range(2)]
    driven.hear(edge.MonitorReport(0, intervals(2.0, learns=True)))
    assert answers(driven) == []
    driven.hear(edge.MonitorReport(1, intervals(3.0, saved=True)))
    (answer,) = answers(driven)
    assert (answer.sketches["step"].longest_s, answer.facts) == (3.0, Facts(learns=True, saved=True))
    assert (answer.configured, answer.caps) == (("step", "io"), {"step": 20.0, "out_of_section": 60.0})
    assert (answer.previous, answer.factor, answer.mode, answer.rule) == ({"step": 12.0}, 3.0, "on", "budget")
    assert answer.known is not None


def test_survey_is_answered_after_a_second_without_ranks_that_have_not_answered() -> None:
    driven = attached(place=1, nodes=2)
    driven.hear(Survey(0, 1), edge.MonitorReport(0, intervals(2.0)))
    driven.wait(ANSWER_NS / 1e9 - 0.01)
    assert answers(driven) == []
    driven.wait(0.02)
    (answer,) = answers(driven)
    assert (answer.sketches["step"].longest_s, answer.known) == (2.0, None)


def test_last_answer_of_a_rank_that_has_exited_still_counts() -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, None), Survey(0, 1))
    for rank in range(2):
        driven.hear(edge.MonitorReport(rank, intervals(2.0 + rank, setup_open=rank == 1)))
    driven.exits(1)
    driven.hear(Survey(0, 2), edge.MonitorReport(0, intervals(2.0, number=2)))
    answer = answers(driven)[-1]
    assert (answer.number, answer.sketches["step"].longest_s) == (2, 3.0)
    assert not answer.facts.setup_open


def test_survey_does_not_wait_for_a_rank_that_exits() -> None:
    driven = attached(place=1, nodes=2)
    driven.hear(Survey(0, 1), edge.MonitorReport(0, intervals(2.0)))
    driven.exits(1)
    assert len(answers(driven)) == 1


def test_answer_of_a_launcher_that_has_not_read_the_file_yet_says_so() -> None:
    driven = attached()
    driven.hear(Survey(0, 1))
    driven.wait(ANSWER_NS / 1e9)
    assert answers(driven)[0].known is None


def test_survey_and_result_of_another_cycle_are_passed_over() -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, None), Survey(1, 1), result(1, timeouts={"step": timeout(7.0)}), Raised(1, "step"))
    assert driven.orders(Survey) == driven.all_of(edge.WriteState) == driven.orders(Arm) == []


# -- what was learned -------------------------------------------------------------------------------------------


def test_changes_of_more_than_a_percent_are_said_and_reasons_once() -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, None))
    step = timeout(6.9, previous_s=8.1, max_observed_s=1.2, rank_of_max=3)
    for _ in range(2):
        driven.hear(result(timeouts={"step": step, "setup": timeout(30.0, previous_s=30.1)}, reasons=("no save",)))
    lines = [line for line in driven.said if line.startswith("timeouts updated")]
    assert lines[0] == "timeouts updated: step 6.9 s (was 8.1 s; the longest took 1.2 s, in rank 3)"
    assert driven.said.count("no save") == 1


def test_timeouts_under_report_are_armed_not_enforced_not_said_and_not_written() -> None:
    configured = {"rank_section_timeouts": {"setup": 600.0}}
    driven = attached(learns=False, configured=configured)
    driven.hear(edge.StateRead(PATH, None))
    said = len(driven.said)
    timeouts = {"step": timeout(7.0), "setup": timeout(9.0)}
    driven.hear(result(timeouts=timeouts, enforces=False, writes=False))
    assert arms(driven)[1] == {"step": Armed(7.0, 21.0, 28.0, enforced=False)}
    assert driven.all_of(edge.WriteState) == []
    assert len(driven.said) == said


def test_file_is_enforced_under_report_too() -> None:
    driven = attached(learns=False)
    driven.hear(edge.StateRead(PATH, state(step=12.0)))
    driven.hear(result(timeouts={"step": timeout(7.0), "setup": timeout(9.0)}, enforces=False, writes=False))
    armed = arms(driven)[0]
    assert (armed["step"].timeout_s, armed["step"].enforced, armed["setup"].enforced) == (12.0, True, False)


def test_ranks_are_not_armed_where_learning_is_off() -> None:
    driven = attached(learns=False, learn="off")
    driven.hear(edge.StateRead(PATH, None))
    driven.hear(result(timeouts={"step": timeout(7.0)}, enforces=False, writes=False))
    assert arms(driven) == {}
    assert driven.said[-1] == "no timeouts configured, learning is off: hangs are not detected by sections"


@pytest.mark.parametrize(
    ("options", "learns", "file", "is_said"),
    [
        ({}, False, None, True),
        ({}, True, None, False),
        ({"learn": "on"}, False, None, False),
        ({}, False, state(step=12.0), False),
        ({"configured": {"rank_out_of_section_timeout": 60.0}}, False, None, False),
    ],
)
def test_line_that_hangs_are_only_reported_is_said_once_where_it_is_true(
    options: dict[str, object], learns: bool, file: LearnedState | None, is_said: bool
) -> None:
    driven = attached(learns=learns, **options)
    driven.hear(edge.StateRead(PATH, file))
    driven.hear(rank_attached(0, 0, None, state_path=PATH))
    assert sum(line.startswith("no timeouts configured: hangs are reported") for line in driven.said) == is_said


def test_unopened_section_is_said_once_with_what_is_only_reported() -> None:
    driven = attached(learns=False, configured={"rank_section_timeouts": {"stpe": 3.0}})
    driven.hear(edge.StateRead(PATH, None), edge.MonitorReport(0, Milestone(0, Moment.STEPS, 10)))
    for _ in range(2):
        driven.hear(result(moment=Moment.STEPS, enforces=False, writes=False, unopened={"stpe": "step", "io": ""}))
    lines = [line for line in driven.said if line.startswith("section")]
    head = "section 'stpe' has a timeout, but no rank has opened it in the first 10 iterations: did you mean 'step'?"
    assert lines == [
        f"{head} Hangs in 'step' are only reported until it has one",
        "section 'io' has a timeout, but no rank has opened it in the first 10 iterations",
    ]


# -- kills ------------------------------------------------------------------------------------------------------


def test_kill_doubles_the_timeout_at_once_and_writes_it_and_says_so_in_the_next_cycle() -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, state(step=5.0)))
    driven.hear(found_hung(0, 0, HANG), found_hung(1, 0, replace(HANG, local_rank=1, rank=10)))
    assert [said for said in driven.told if isinstance(said, Raised)] == [Raised(0, "step")]
    assert arms(driven)[1]["step"].timeout_s == 10.0
    (write,) = driven.all_of(edge.WriteState)
    assert (write.path, write.moment) == (PATH, None)
    assert write.state.timeouts["step"].timeout_s == 10.0
    driven.hear(Raised(0, "step"))  # of another node
    assert arms(driven)[1]["step"].timeout_s == 10.0
    next_cycle(driven, 1)
    next_cycle(driven, 2)
    assert driven.said.count("the timeout of 'step' terminated a rank in the last cycle: it is 10 s now (5 s x 2)") == 1


def test_kill_of_another_node_is_applied_and_told_no_further() -> None:
    driven = attached(place=1, nodes=2)
    driven.hear(edge.StateRead(PATH, state(step=5.0)), Raised(0, "step"))
    assert arms(driven)[0]["step"].timeout_s == 10.0
    assert [said for said in driven.told if isinstance(said, Raised)] == []
    assert driven.all_of(edge.WriteState) == []


def test_doubling_is_limited_by_the_configured_timeout() -> None:
    configured = {"rank_section_timeouts": {"step": 8.0}}
    driven = attached(configured=configured)
    loaded = replace(state(step=5.0), configured=configured)
    driven.hear(edge.StateRead(PATH, loaded), Raised(0, "step"))
    assert arms(driven)[0]["step"].timeout_s == 8.0
    next_cycle(driven, 1)
    line = "the timeout of 'step' terminated a rank in the last cycle: it is 8 s now"
    assert f"{line} (5 s x 2, limited by its configured timeout)" in driven.said


@pytest.mark.parametrize("name", ["heartbeat", "step"])
def test_timeout_that_a_client_has_calculated_is_doubled_with_each_kill(name: str) -> None:
    driven = attached(path="", learns=False)
    for cycle in range(2):
        driven.hear(Raised(cycle, name))
        next_cycle(driven, cycle + 1)
        driven.hear(rank_attached(0, cycle + 1, driven.now_ns))
        assert factors(driven) == {name: 2.0 ** (cycle + 1)}
    assert driven.all_of(edge.WriteState) == []


def test_kill_is_not_undone_by_a_result_that_was_computed_before_it() -> None:
    driven = attached()
    driven.hear(edge.StateRead(PATH, state(step=5.0)))
    known = {"step": KNOWN}
    driven.hear(result(timeouts={"step": timeout(5.0)}, known=known), Raised(0, "step"))
    raised_s = arms(driven)[0]["step"].timeout_s
    driven.hear(result(timeouts={"step": timeout(5.0)}, known=known))
    assert arms(driven)[0]["step"].timeout_s == raised_s == 10.0


# -- report only ------------------------------------------------------------------------------------------------


def test_hang_under_report_is_diagnosed_on_all_nodes_and_ends_nothing() -> None:
    driven = attached(learns=False)
    for local_rank in (0, 1, 0):
        driven.hear(found_hung(local_rank, 0, replace(HANG, local_rank=local_rank), observed_only=True))
    (hang,) = [said for said in driven.told if isinstance(said, m.Hang)]
    assert hang.passive
    text = "rank 0 in 'step' for 6.1 s after iteration 60 (learned timeout 5.0 s), in recv"
    for _ in range(2):
        driven.hear(replace(REVIEW, text=text))
    assert [line for line in driven.said if line.startswith("would be a hang")] == [
        f"would be a hang: {text}; set timeouts or --ft-learn on to restart"
    ]
    driven.wait(60.0)
    assert not driven.all_of(edge.SignalRanks)
    assert not driven.all_of(Release)
    assert not [said for said in driven.told if isinstance(said, m.Report | Raised)]


def test_learned_timeout_exceeded_under_observe_only_is_told_once_with_the_rank_at_fault() -> None:
    driven = attached(learns=False, observe_only=True)
    for local_rank in (0, 1):
        driven.hear(found_hung(local_rank, 0, replace(HANG, local_rank=local_rank), observed_only=True))
    (hang,) = [said for said in driven.told if isinstance(said, m.Hang)]
    assert hang.passive
    text = "rank 1 in 'step' for 6.1 s (learned timeout 5.0 s), in recv; rank 0 waits in all_reduce"
    for _ in range(2):
        driven.hear(replace(REVIEW, text=text, rank=1))
    assert [line for line in driven.said if "not killed" in line] == [
        f"would be a hang: {text}: not killed (observe-only)"
    ]


def test_configured_timeout_exceeded_under_observe_only_is_told_of_its_rank() -> None:
    driven = attached(learns=False, observe_only=True)
    driven.hear(found_hung(0, 0, replace(HANG, learned=False), observed_only=True))
    assert driven.said[-1].endswith("not killed (observe-only)")
    assert not [said for said in driven.told if isinstance(said, m.Hang)]
