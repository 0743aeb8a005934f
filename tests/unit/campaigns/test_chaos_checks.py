"""What the chaos campaign looks at is seen when it is wrong: each violation planted into a run that was right."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.chaos.check import CHECKS, Launch, Seen, problems
from tests.chaos.plan import Event, Plan

KILL = Event(fault="rank_killed", phase="step", launch=0, cycle=0, rank=1, iteration=5)
HANG = Event(fault="sleep", phase="load", launch=0, cycle=1, rank=0)
SUSPENDED = Event(fault="node_suspended", phase="step", launch=0, cycle=2, rank=0, iteration=7)
LEAVES = Event(fault="launcher_killed", phase="save", launch=0, cycle=2, rank=0, iteration=9)
WEIGHTS = "ab12"


def ended(cycle: int, outcome: str = "failed", text: str = "", detail: str = "", rank: int | None = None) -> Any:
    return {
        "ev": "cycle_ended",
        "cycle": cycle,
        "outcome": outcome,
        "cause": {"text": text, "detail": detail, "rank": rank},
    }


def noted(what: str, cycle: int, launch: int = 0, **more: int) -> Any:
    return {"what": what, "rank": 0, "cycle": cycle, "launch": launch, **more}


@pytest.fixture
def right() -> Seen:
    """A rank is killed, one hangs, the node stands still, the launcher is killed, the next one finishes."""
    plan = Plan(seed=1, layout="dp", preload="none", learns=False, events=(KILL, HANG, SUSPENDED, LEAVES))
    first = [
        ended(0, text="rank 1 killed by SIGKILL (not sent by ft_launcher)", detail="after iteration 5", rank=1),
        ended(1, text="rank 0 hung in 'setup' for 20.0 s (timeout 20.0 s)", detail="in a.py:1 f", rank=0),
    ]
    trace = [
        noted("began", 0, iteration=0),
        noted("saved", 0, iteration=3),
        noted("fault", 0, number=0),
        noted("fault", 1, number=1),
        noted("began", 2, iteration=3),
        noted("saved", 2, iteration=6),
        noted("fault", 2, number=2),
        noted("fault", 2, number=3),
        noted("began", 0, launch=1, iteration=6),
        noted("saved", 0, launch=1, iteration=10),
    ]
    launches = [Launch(number=0, code=-9, records=first), Launch(number=1, code=0, records=[ended(0, "succeeded")])]
    return Seen(plan=plan, launches=launches, trace=trace, weights=WEIGHTS, undisturbed=WEIGHTS)


def with_record(seen: Seen, cycle: int, record: Any) -> Seen:
    first, *others = seen.launches
    records = [record if each["cycle"] == cycle else each for each in first.records]
    return dataclasses.replace(seen, launches=[dataclasses.replace(first, records=records), *others])


def with_more(seen: Seen, record: Any) -> Seen:
    first, *others = seen.launches
    return dataclasses.replace(seen, launches=[dataclasses.replace(first, records=[*first.records, record]), *others])


def with_trace(seen: Seen, number: int, **changes: int) -> Seen:
    trace = [{**record, **changes} if index == number else record for index, record in enumerate(seen.trace)]
    return dataclasses.replace(seen, trace=trace)


def without_trace(seen: Seen, number: int) -> Seen:
    return dataclasses.replace(seen, trace=[r for index, r in enumerate(seen.trace) if index != number])


def with_codes(seen: Seen, *codes: int | None) -> Seen:
    pairs = zip(seen.launches, codes, strict=True)
    return dataclasses.replace(seen, launches=[dataclasses.replace(launch, code=code) for launch, code in pairs])


def test_correct_run_has_no_problems(right: Seen) -> None:
    assert problems(right) == []


PLANTED = {
    "a fault that never fired": (lambda seen: without_trace(seen, 6), "this fault never happened: node_suspended"),
    "a fault that hit nothing": (
        lambda seen: dataclasses.replace(seen, missed={2}),
        "this fault hit nothing: node_suspended",
    ),
    "other weights": (lambda seen: dataclasses.replace(seen, weights="cd34"), "final weights are cd34"),
    "no weights": (lambda seen: dataclasses.replace(seen, weights=None), "final weights are None"),
    "a skipped restore": (lambda seen: with_trace(seen, 4, iteration=0), "began at iteration 0, though 3 was saved"),
    "a skipped restore of the next launch": (lambda seen: with_trace(seen, 8, iteration=3), "though 6 was saved"),
    "another rank accused": (
        lambda seen: with_record(seen, 0, ended(0, text="rank 0 killed by SIGKILL (not sent by ft_launcher)")),
        "but the cause that is named is 'rank 0 killed",
    ),
    "another fault named": (
        lambda seen: with_record(seen, 0, ended(0, text="rank 1 exited with code 1")),
        "but the cause that is named is 'rank 1 exited",
    ),
    "candidates without the rank": (
        lambda seen: with_record(
            seen,
            1,
            ended(
                1,
                text="hang detected (first on rank 1: hung in 'setup' for 20.0 s)",
                detail="root cause undetermined; candidates: rank 1 in a.py:1 f",
            ),
        ),
        'but the cause that is named is "hang detected (first on rank 1',
    ),
    "an end that isn't logged": (
        lambda seen: with_record(seen, 1, ended(7, "succeeded")),
        "no end of its cycle is logged: sleep",
    ),
    "a success after a fault": (lambda seen: with_record(seen, 1, ended(1, "succeeded")), "its cycle succeeded: sleep"),
    "a healthy rank killed": (
        lambda seen: with_more(seen, ended(5, text="rank 1 hung in 'step'")),
        'cycle 5 of launch 0 ended with no fault: "rank 1 hung',
    ),
    "the wrong exit code": (lambda seen: with_codes(seen, 1, 0), "launch 0 ended with code 1, and not with -9"),
    "no end": (lambda seen: with_codes(seen, -9, None), "launch 1 didn't end, and not with 0"),
    "a failure in the end": (lambda seen: with_codes(seen, -9, 1), "the last launch didn't end well"),
    "a process left": (lambda seen: dataclasses.replace(seen, left=["process 77 python"]), "left: process 77 python"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_seen(right: Seen, what: str) -> None:
    plant, said = PLANTED[what]
    found = problems(plant(right))
    assert any(said in problem for problem in found), found


def test_candidates_with_the_rank_are_no_accusation(right: Seen) -> None:
    detail = "root cause undetermined; candidates: rank 0 in a.py:1 f; rank 1 in b.py:2 g"
    text = "hang detected (first on rank 1: hung in 'setup' for 20.0 s (timeout 20.0 s))"
    assert problems(with_record(right, 1, ended(1, text=text, detail=detail))) == []


def test_every_check_is_planted(right: Seen) -> None:
    seen_by = {check for check in CHECKS for plant, _ in PLANTED.values() if list(check(plant(right)))}
    assert seen_by == set(CHECKS)
