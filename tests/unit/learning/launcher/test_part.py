"""Learned timeouts on one node: what is read, armed, asked, said, doubled and written."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from megatron_ft.config.config import ConfigValues
from megatron_ft.diagnosis.hang_messages import Hang, Reviewed
from megatron_ft.job.rules import messages as m
from megatron_ft.launcher.rules import events
from megatron_ft.learning.launcher.part import TellStateWritten
from megatron_ft.learning.messages import FACT_SAVED, Arm, Intervals, Killed, Observed
from megatron_ft.learning.timeouts import LearnedState, StateFile, parse
from megatron_ft.link.base import layout
from megatron_ft.link.messages.monitor_messages import Release
from tests.fuzz.healthy import BOARD
from tests.support.agents import Driven, found_hung, hung, verdict
from tests.support.agents import attached as rank_attached

T = TypeVar("T")
PATH = "/ckpt/ft_state.json"
HANG = hung(elapsed_s=75.1, timeout_s=75.0, iteration=60, learned=True)
REVIEW = Reviewed(
    cycle=0,
    asker=0,
    verdict=hung(elapsed_s=6.1, timeout_s=5.0, iteration=60, learned=True),
    text="rank 0 in 'step' for 6.1 s after iteration 60 (learned timeout 5 s), in recv",
    rank=0,
    is_waited=True,
)
REPORTED = layout.FACT_HOOKS | layout.FACT_LOADED | layout.FACT_ENOUGH_STEPS | FACT_SAVED
READY = REPORTED | layout.FACT_LEARNS
_saves = itertools.count(1)


def result(cycle: int = 0, at: str = "save", facts: int = READY, **longest_s: float) -> Intervals:
    """Maxima of all nodes, in a job whose script asks for learned timeouts."""
    seen = {name: Observed(100, seconds, 3) for name, seconds in longest_s.items()}
    return Intervals(cycle, (next(_saves) if at == "save" else 0, 100), at == "end", facts, seen)


def attached(*, learns: bool = True, path: str = PATH, place: int = 0, nodes: int = 1, **options: Any) -> Driven:
    """Two ranks, whose scripts use the hooks of a train loop."""
    observe_only = options.pop("observe_only", False)
    driven = Driven(learning=ConfigValues(**options), observe_only=observe_only)
    driven.run(place=place, nodes=nodes)
    for local_rank in range(2):
        driven.hear(rank_attached(local_rank, 0, driven.now_ns, state_path=path, learns=learns))
    return driven


def loaded(timeouts: dict[str, float] | None = None, **options: Any) -> Driven:
    """These timeouts are those of the file."""
    driven = attached(**options)
    driven.hear(StateFile(PATH, state=None if timeouts is None else LearnedState(timeouts=timeouts)))
    return driven


def next_cycle(driven: Driven, cycle: int, path: str = PATH) -> None:
    """The ranks of the last cycle have ended, and others are started."""
    driven.exits(0, 7)
    driven.exits(1, -15, sent=(15,))
    driven.ends()
    driven.hear(events.RanksEnded(), verdict(cycle - 1, node=0, rank=0, text="rank 0 hung"))
    driven.run(cycle=cycle)
    driven.hear(rank_attached(0, cycle, driven.now_ns, state_path=path, learns=bool(path)))


def arms(driven: Driven) -> dict[int, Arm]:
    """By local rank, what its monitor was armed with last."""
    return {each.local_rank: each.order for each in driven.orders(Arm) if isinstance(each.order, Arm)}


def writes(driven: Driven) -> list[StateFile]:
    return [each for each in driven.all_of(StateFile) if each.document is not None]


def written(driven: Driven) -> LearnedState:
    """What was written last."""
    return parse(json.loads(json.dumps(writes(driven)[-1].document)))


def told(driven: Driven, kind: type[T]) -> list[T]:
    """What the leader was told of this kind."""
    return [each for each in driven.told if isinstance(each, kind)]


CHANGED = {"learned_floor": 7.0, "rank_section_timeouts": {"step": 200.0}}


@pytest.mark.parametrize(
    ("options", "armed", "line"),
    [
        ({}, {"step": 60.0, "setup": 240.0, "save": 300.0}, f"loaded from {PATH}: step 60 s, setup 240 s, save 300 s"),
        ({"learned_floor": 7.0}, {"step": 7.0, "setup": 28.0, "save": 300.0}, "step 7 s, setup 28 s, save 300 s"),
        (CHANGED, {"setup": 28.0, "save": 300.0}, "'step' keeps its configured timeout of 200 s"),
        ({"learns": False}, {"step": 5.0, "setup": 20.0, "save": 300.0}, "setup 20 s, save 300 s (reported only)"),
    ],
)
def test_file_is_read_once_and_arms_all_ranks_at_the_floor_and_by_default_for_reports_only(
    options: dict[str, Any], armed: dict[str, float], line: str
) -> None:
    driven, arm = attached(**options), Arm(0, armed, options.get("learns", True))
    assert driven.all_of(StateFile) == [StateFile(PATH)]
    assert arms(driven) == {}
    found = LearnedState(timeouts={"step": 5.0, "setup": 5.0, "save": 300.0}, configured_s={"step": 180.0})
    driven.hear(StateFile(PATH, state=found))
    assert arms(driven) == {0: arm, 1: arm}
    assert any(line in said for said in driven.said)
    driven.done.clear()
    driven.hear(rank_attached(1, 0, None, state_path=PATH))  # its monitor was replaced
    assert arms(driven) == {1: arm}


@pytest.mark.parametrize(
    ("place", "unusable", "failure", "says"),
    [
        (0, "", "", [layout.STATE_WRITTEN]),
        (0, "", "it can't be written: Read-only file system", [layout.STATE_NOT_WRITTEN]),
        (0, "it is a directory: leaving it alone", "", [layout.STATE_NOT_WRITTEN]),
        (1, "", "", []),
    ],
)
def test_learned_timeouts_are_written_at_place_0_if_the_file_can_be_used_and_ranks_are_told_at_the_end(
    place: int, unusable: str, failure: str, says: list[int]
) -> None:
    driven = attached(place=place, nodes=2)
    driven.hear(result(step=30.0))
    assert arms(driven) == {}, "the file was not read yet"
    driven.hear(StateFile(PATH, problem=unusable), result(step=20.0), result(at="end", step=20.0, out_of_section=50.0))
    assert arms(driven)[0] == Arm(0, {"step": 100.0}), "what is learned at the end is for the next run"
    wanted = writes(driven)
    assert [each.at_end for each in wanted] == ([] if unusable or place else [False, True])
    driven.hear(*(dataclasses.replace(each, problem=failure) for each in wanted))
    assert driven.all_of(TellStateWritten) == [TellStateWritten(value) for value in says]
    assert [line for line in driven.said if line in (unusable, failure)] == [
        each for each in (unusable or failure,) if each
    ]
    next_cycle(driven, 1)
    assert arms(driven)[0] == Arm(1, {"step": 100.0, "out_of_section": 250.0})


def news(length_s: float, saves: int = 0, *, ended: bool = False) -> Intervals:
    """What a monitor reports."""
    return Intervals(0, (saves, 0), ended, seen={"step": Observed(9, length_s)})


@pytest.mark.parametrize("last", [news(2.5, 1), news(2.5, ended=True)], ids=["save", "end"])
@pytest.mark.parametrize("has_exited", [True, False])
def test_rank_that_has_left_the_run_is_not_waited_for_and_its_last_intervals_count(
    last: Intervals, has_exited: bool
) -> None:
    driven = loaded()
    driven.hear(events.MonitorReport(1, news(3.0)), events.MonitorReport(0, last))
    assert told(driven, Intervals) == []
    if has_exited:
        driven.exits(1)
    else:
        driven.boards[1] = BOARD._replace(closing=True)  # it goes on without monitoring
        driven.hear(events.Tick())
    assert [(each.ended, each.seen["step"].longest_s) for each in told(driven, Intervals)] == [(last.ended, 3.0)]


def test_what_is_learned_is_armed_written_and_said_with_the_interval_it_rests_on() -> None:
    driven = loaded({"step": 300.0})
    driven.hear(result(at="steps", step=20.0), result(1, step=20.0), Killed(1, "step", 300.0, moved=True))
    assert arms(driven)[1] == Arm(0, {"step": 300.0}), "learned after saves, in this cycle"
    maxima = result(step=20.0, setup=100.0)
    driven.hear(replace(maxima, seen={**maxima.seen, "checkpointing": Observed(0, 500.0, 1)}))  # open, never closed
    assert arms(driven)[1] == Arm(0, {"step": 200.0, "setup": 500.0})
    assert [each for each in driven.said if each.startswith("timeouts updated")] == [
        "timeouts updated: setup 500 s (the longest took 100 s, in rank 3); "
        "step 200 s (was 300 s; the longest took 20 s, in rank 3)"
    ]
    (write,) = writes(driven)
    assert (write.path, write.at_end, written(driven).timeouts["step"]) == (PATH, False, 200.0)
    said = len(driven.said)
    driven.hear(result(step=40.0, setup=100.0))
    assert len(driven.said) == said, "no line for less than a percent, and a reason once"


REPORTS = "no timeouts configured: hangs are reported, not killed (set timeouts or --ft-learn on to kill)"
IS_OFF = "no timeouts configured, learning is off: hangs are not detected by sections"


@pytest.mark.parametrize(
    ("options", "is_armed", "is_enforced", "lines"),
    [
        ({}, True, False, [REPORTS]),
        ({"learns": True}, True, True, []),
        ({"learn": "on"}, True, True, []),
        ({"rank_out_of_section_timeout": 60.0}, True, False, []),
        ({"learn": "off"}, False, False, [IS_OFF]),
    ],
)
def test_mode_decides_whether_ranks_are_armed_and_terminated_and_a_file_written(
    options: dict[str, Any], is_armed: bool, is_enforced: bool, lines: list[str]
) -> None:
    driven = loaded(**{"learns": False, **options})
    driven.hear(rank_attached(0, 0, None, state_path=PATH))
    left = loaded({"step": 75.0}, **{"learns": False, **options})
    assert (0 in arms(left), any("loaded" in line for line in left.said)) == (is_armed, is_armed)
    assert [line for line in driven.said if line.startswith("no timeouts")] == lines
    driven.hear(result(at="steps", facts=REPORTED, step=20.0, io=3.0))
    assert (0 in arms(driven)) is (is_armed and not is_enforced)
    driven.hear(result(facts=REPORTED, step=20.0))
    assert arms(driven).get(1) == (Arm(0, {"step": 100.0}, is_enforced) if is_armed else None)
    assert bool(writes(driven)) is is_enforced


def test_timeout_is_doubled_only_if_it_ends_the_next_cycle_too() -> None:
    timeouts = {"step": 75.0, "setup": 300.0}
    driven = loaded(timeouts)
    driven.hear(found_hung(0, 0, HANG), found_hung(1, 0, replace(HANG, local_rank=1, rank=10)))
    assert told(driven, Killed) == [Killed(0, "step", 75.0)]
    for cycle, section in enumerate(("setup", "step"), start=1):
        next_cycle(driven, cycle)
        driven.hear(found_hung(0, cycle, replace(HANG, section=section)))
    next_cycle(driven, 3)
    assert arms(driven)[0] == Arm(3, timeouts), "no cycle has ended like the one before"
    driven.hear(found_hung(0, 3, HANG), Killed(3, "step", 75.0))
    assert written(driven).timeouts["step"] == 150.0
    next_cycle(driven, 4)
    assert driven.said.count("the timeout of 'step' terminated a rank again: it is 150 s now, was 75 s") == 1
    driven.hear(result(4, step=15.0))
    assert arms(driven)[0].timeouts["step"] == 150.0, "the job may come to the same interval again"
    next_cycle(driven, 5)
    driven.hear(result(5, step=15.0))
    assert arms(driven)[0].timeouts["step"] == (150.0 + 75.0) / 2, "a later calculation halves the surplus"


def test_kill_of_a_rank_while_others_moved_doubles_the_timeout_at_once_on_all_nodes() -> None:
    driven = loaded({"step": 75.0})
    driven.hear(found_hung(0, 0, replace(HANG, elapsed_s=300.1)))
    assert told(driven, Killed) == [Killed(0, "step", 75.0, moved=True)]
    other = loaded({"step": 75.0}, place=1, nodes=2)
    other.hear(*[Killed(0, "step", 75.0, moved=True)] * 2)
    assert told(other, Killed) == writes(other) == []
    for each in (driven, other):
        next_cycle(each, 1)
        assert arms(each)[0] == Arm(1, {"step": 150.0})


def test_script_that_calculates_timeouts_itself_is_told_so_and_they_are_doubled_too() -> None:
    driven = attached(path="", learns=False, learn="on")
    driven.hear(result(at="steps", facts=0, step=20.0))
    assert driven.said[-1].startswith("no timeouts are learned from a script that calls RankMonitorClient itself")
    for cycle, timeout_s in enumerate((60.0, 60.0, 120.0)):
        driven.hear(Killed(cycle, "heartbeat", timeout_s))
        next_cycle(driven, cycle + 1, path="")
    assert arms(driven)[0] == Arm(3, {"heartbeat": 240.0})
    assert writes(driven) == []


@pytest.mark.parametrize(
    ("observe_only", "follows"),
    [(False, "; set timeouts or --ft-learn on to restart"), (True, ": not killed (observe-only)")],
)
def test_hang_that_is_only_reported_is_diagnosed_once_ends_nothing_and_doubles_the_timeout(
    observe_only: bool, follows: str
) -> None:
    driven = loaded(learns=False, observe_only=observe_only)
    driven.hear(result(at="steps", facts=REPORTED, step=1.0))
    for local_rank in (0, 1, 0):
        driven.hear(found_hung(local_rank, 0, replace(HANG, local_rank=local_rank), observed_only=True))
    (hang,) = told(driven, Hang)
    assert hang.passive
    for iteration, expected_s, rank in [(60, 10.0, 0), (61, 20.0, None), (61, 20.0, 0)]:
        late = replace(REVIEW.verdict, iteration=iteration)
        driven.hear(replace(REVIEW, rank=rank, is_waited=rank == 0, verdict=late))
        assert arms(driven)[0] == Arm(0, {"step": expected_s}, enforced=False)
    said = [line for line in driven.said if line.startswith("would be a hang")]
    assert (len(said), said[0]) == (2, f"would be a hang: {REVIEW.text}{follows}")
    driven.wait(60.0)
    assert driven.all_of(events.SignalRanks) == driven.all_of(Release) == []
    assert told(driven, m.Report) == told(driven, Killed) == []
