"""What the chaos campaign looks at is seen when it is wrong: each violation planted into a run that was right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.check import CHECKS, Launch, Seen, problems
from tests.chaos.plan import Event, Plan

KILL = Event(fault="rank_killed", phase="step", launch=0, cycle=0, rank=1, iteration=5)
HANG = Event(fault="sleep", phase="load", launch=0, cycle=1, rank=0)
SUSPENDED = Event(fault="node_suspended", phase="step", launch=0, cycle=2, rank=0, iteration=7)
LEAVES = Event(fault="launcher_killed", phase="save", launch=0, cycle=2, rank=0, iteration=9)
FIRST_IS_HUNG = "hang detected (first on rank 1: hung in 'setup' for 20.0 s (timeout 20.0 s))"
CANDIDATES = "root cause undetermined; candidates: rank 1 in a.py:1 f"


def ended(cycle: int, outcome: str = "failed", text: str = "", detail: str = "") -> Any:
    return {"ev": "cycle_ended", "cycle": cycle, "outcome": outcome, "cause": {"text": text, "detail": detail}}


def noted(what: str, cycle: int, launch: int = 0, **more: int) -> Any:
    return {"what": what, "rank": 0, "cycle": cycle, "launch": launch, **more}


def right() -> Seen:
    """A rank is killed, one hangs, the node stands still, the launcher is killed, the next one finishes."""
    plan = Plan(seed=1, layout="dp", preload="none", learns=False, events=(KILL, HANG, SUSPENDED, LEAVES))
    first = [
        ended(0, text="rank 1 killed by SIGKILL (not sent by ft_launcher)", detail="after iteration 5"),
        ended(1, text="rank 0 hung in 'setup' for 20.0 s (timeout 20.0 s)", detail="in a.py:1 f"),
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
    return Seen(plan=plan, launches=launches, trace=trace, weights="ab12", undisturbed="ab12")


def has(**fields: Any) -> Callable[[Seen], Seen]:
    """Other fields of what was seen."""
    return lambda seen: replace(seen, **fields)


def logs(cycle: int, record: Any) -> Callable[[Seen], Seen]:
    """Another record, in the log of the first launch, of the end of a cycle."""

    def plant(seen: Seen) -> Seen:
        first, last = seen.launches
        others = [each for each in first.records if each["cycle"] != cycle]
        return replace(seen, launches=[replace(first, records=[*others, record]), last])

    return plant


def ends(*codes: int | None) -> Callable[[Seen], Seen]:
    """Other exit codes."""
    return lambda seen: replace(seen, launches=[replace(each, code=codes[each.number]) for each in seen.launches])


def notes(at: int, **changes: Any) -> Callable[[Seen], Seen]:
    """Another record of the trace."""

    def plant(seen: Seen) -> Seen:
        trace = copy.deepcopy(list(seen.trace))
        trace[at] |= changes
        return replace(seen, trace=trace)

    return plant


PLANTED = {
    "final weights are cd34": has(weights="cd34"),
    "final weights are None": has(weights=None),
    "began at iteration 0, though 3 was saved": notes(4, iteration=0),
    "cycle 0 of launch 1 began at iteration 3, though 6 was saved": notes(8, iteration=3),
    "but the cause that is named is 'rank 0 killed": logs(
        0, ended(0, text="rank 0 killed by SIGKILL (not sent by ft_launcher)")
    ),
    "but the cause that is named is 'rank 1 exited": logs(0, ended(0, text="rank 1 exited with code 1")),
    'but the cause that is named is "hang detected (first on rank 1': logs(
        1, ended(1, text=FIRST_IS_HUNG, detail=CANDIDATES)
    ),
    "no end of its cycle is logged: sleep": logs(1, ended(7, "succeeded")),
    "its cycle succeeded: sleep": logs(1, ended(1, "succeeded")),
    'cycle 5 of launch 0 ended with no fault: "rank 1 hung': logs(5, ended(5, text="rank 1 hung in 'step'")),
    "launch 0 ended with code 1, and not with -9": ends(1, 0),
    "launch 1 didn't end, and not with 0": ends(-9, None),
    "the last launch didn't end well": ends(-9, 1),
    "left: process 77 python": has(left=["process 77 python"]),
}


@pytest.mark.parametrize("said", PLANTED)
def test_a_planted_violation_is_seen(said: str) -> None:
    found = problems(PLANTED[said](right()))
    assert any(said in problem for problem in found), found


def test_correct_run_has_no_problems_nor_one_whose_hang_has_the_rank_among_its_candidates() -> None:
    assert problems(right()) == []
    plant = logs(1, ended(1, text=FIRST_IS_HUNG, detail=f"{CANDIDATES}; rank 0 in b.py:2 g"))
    assert problems(plant(right())) == []


def test_every_check_is_planted() -> None:
    seen_by = {check for check in CHECKS for plant in PLANTED.values() if list(check(plant(right())))}
    assert seen_by == set(CHECKS)
