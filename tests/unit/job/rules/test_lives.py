"""What ``result.json`` holds: one record for each life of a job, and what the next life takes from them."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from megatron_ft.job.rules.faults import Fault, FaultKind
from megatron_ft.job.rules.lives import Ending, Life, Lives, NodeEnd
from megatron_ft.job.rules.restart_policy import JobProgress, Reached

COMMAND = ("python", "train.py")
LIFE = Life(job="job-1", command=COMMAND, began="2026-01-01T00:00:00Z", nodes=2, cycles=1)


def a_fault(node: str, cycle: int, kind: FaultKind = FaultKind.RANK, **more: bool) -> Fault:
    return Fault(node=node, cycle=cycle, kind=kind, text=f"cycle {cycle}", **more)


def test_result_is_read_as_it_was_written() -> None:
    life = replace(LIFE, outcome=Ending.FAILED, exit_code=1, faults=(a_fault("b", 3), a_fault("c", 4, FaultKind.LOST)))
    lives = Lives().begun(life)
    assert Lives.parse(lives.to_text()) == lives
    document = json.loads(lives.to_text())
    assert document["bad_nodes"] == {"c": "cycle 4"}
    assert document["lives"][0]["outcome"] == "failed"
    assert document["lives"][0]["life"] == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 2, "lives": []}', '{"version": 1, "lives": [{}]}', '{"version":1,"lives":7}', "[" * 9**6],
)
def test_text_that_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Lives.parse(text)


def test_job_has_finished_if_its_last_life_has_and_no_other_job() -> None:
    finished = Lives().begun(replace(LIFE, outcome=Ending.FINISHED))
    assert [finished.has_finished(job) for job in ("job-1", "job-2")] == [True, False]
    assert not finished.begun(LIFE).has_finished("job-1")


def test_a_life_that_ended_without_a_word_is_told_by_the_next() -> None:
    lives = Lives().begun(LIFE).begun(LIFE)
    assert [(life.life, life.outcome) for life in lives.lives] == [(1, Ending.LOST), (2, Ending.RUNNING)]
    assert "no end was recorded" in lives.lives[0].cause


def test_another_launcher_goes_on_with_the_record_and_keeps_its_faults() -> None:
    lives = Lives().begun(replace(LIFE, faults=(a_fault("a", 0), a_fault("b", 1))))
    later = replace(
        LIFE, began="2026-01-01T01:00:00Z", cycles=3, faults=(a_fault("b", 1, advanced=True), a_fault("c", 2))
    )
    (life,) = lives.updated(later).lives
    assert (life.began, life.cycles, life.life) == (LIFE.began, 3, 1)
    assert [(fault.node, fault.advanced) for fault in life.faults] == [("a", False), ("b", True), ("c", False)]


def test_recorded_end_is_replaced_by_the_first_launcher_only() -> None:
    stopped = replace(LIFE, outcome=Ending.STOPPED, exit_code=0)
    failed = replace(LIFE, outcome=Ending.FAILED, exit_code=1)
    lives = Lives().begun(LIFE).updated(failed, is_first=False)
    assert lives.lives[-1].outcome is Ending.FAILED
    assert lives.updated(stopped, is_first=False) is lives
    assert lives.updated(stopped, is_first=True).lives[-1].outcome is Ending.STOPPED


def test_a_decided_end_replaces_one_that_is_not_and_is_final() -> None:
    lost = replace(LIFE, outcome=Ending.LOST, exit_code=94)
    finished = replace(LIFE, outcome=Ending.FINISHED, exit_code=0, decided=True)
    lives = Lives().begun(LIFE).updated(lost, is_first=True).updated(finished, is_first=False)
    assert lives.lives[-1].outcome is Ending.FINISHED
    assert lives.updated(lost, is_first=True) is lives
    assert lives.updated(replace(finished, outcome=Ending.FAILED), is_first=True) is lives


def test_a_launcher_that_never_learned_the_end_says_only_how_its_own_node_left() -> None:
    fault = replace(a_fault("a", 0), kind=FaultKind.LOST)
    lives = Lives().begun(replace(LIFE, faults=(fault,)))
    assert lives.bad_nodes()
    left = lives.left(LIFE.job, NodeEnd(node="a", exit_code=94, cause="no coordinator reachable"))
    assert left.lives[-1].outcome is Ending.RUNNING
    assert left.bad_nodes() == {}
    ended = left.updated(replace(LIFE, outcome=Ending.FINISHED, decided=True, faults=(fault,)), is_first=True)
    assert [(each.node, each.exit_code) for each in ended.lives[-1].left] == [("a", 94)]
    assert left.begun(LIFE).lives[0].cause == "no coordinator reachable"


def test_the_end_of_another_job_is_a_life_of_its_own() -> None:
    lives = Lives().begun(LIFE).updated(replace(LIFE, job="job-2", outcome=Ending.LOST), is_first=False)
    assert [life.job for life in lives.lives] == ["job-1", "job-2"]


@pytest.mark.parametrize(
    ("outcome", "carried"),
    [
        (Ending.FAILED, True),
        (Ending.RUNNING, True),
        (Ending.FINISHED, False),
        (Ending.NO_PROGRESS, False),
    ],
)
def test_progress_is_carried_to_the_next_life_unless_the_job_was_over(outcome: Ending, carried: bool) -> None:
    lives = Lives().begun(replace(LIFE, outcome=outcome, resumed=10, iteration=25, stalled=2))
    assert lives.advance(COMMAND) == (JobProgress(10, 25, 2) if carried else JobProgress())
    assert lives.advance(("python", "other.py")) == JobProgress()
    assert Lives().begun(replace(LIFE, outcome=outcome, trained=True)).advance(COMMAND).trained is carried


def test_failures_at_the_same_place_add_up_over_lives() -> None:
    lives, advance, counts = Lives(), JobProgress(), []
    for _ in range(3):
        advance = lives.advance(COMMAND)
        for _ in range(3):
            advance = advance.after(Reached(first=0, last=3))
        counts.append(advance.stalled)
        lives = lives.begun(replace(LIFE, outcome=Ending.FAILED, resumed=0, iteration=3, stalled=advance.stalled))
    assert counts == [2, 5, 8]


@pytest.mark.parametrize(
    ("job", "command", "ended", "is_it"),
    [
        ("train", ("a.py",), "2026-01-01T00:00:10Z", True),
        ("train", ("a.py",), "2026-01-01T00:00:09Z", False),
        ("train", ("a.py", "--phase=2"), "2026-01-01T00:00:10Z", False),
        ("other", ("a.py",), "2026-01-01T00:00:10Z", False),
    ],
)
def test_job_has_just_finished_if_the_same_command_ended_not_long_ago(
    job: str, command: tuple[str, ...], ended: str, is_it: bool
) -> None:
    life = Life(job="train", command=("a.py",), outcome=Ending.FINISHED, ended=ended)
    lives = Lives().begun(life)
    assert lives.has_finished(job, command, since="2026-01-01T00:00:10Z") is is_it
    assert lives.has_finished(job) is (job == "train")
    assert not Lives().begun(replace(life, outcome=Ending.STOPPED)).has_finished(job)
