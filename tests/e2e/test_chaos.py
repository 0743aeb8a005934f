"""A few runs of the chaos campaign: the example's job meets faults at odd moments and ends with the right weights."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos.check import Seen, problems
from tests.chaos.one import MEGATRON, Run
from tests.chaos.plan import Event, Plan
from tests.support import forked_launcher

pytestmark = pytest.mark.timeout(300)  # each starts several Megatron jobs, the first with everything to import

# what no other test does to a job, in two runs
EVENTS = {
    "killed before and after it is final, then again before its first step": (
        Event(fault="rank_killed", phase="save", launch=0, cycle=0, rank=1, iteration=3),
        Event(fault="rank_killed", phase="written", launch=0, cycle=1, rank=0, iteration=3),
        Event(fault="exception", phase="load", launch=0, cycle=2, rank=1),
        Event(fault="segfault", phase="exit", launch=0, cycle=3, rank=0),
    ),
    "what hurts nobody, then a launcher that is killed in a restart": (
        Event(fault="run_dir_removed", phase="step", launch=0, cycle=0, rank=1, iteration=1),
        Event(fault="board", phase="step", launch=0, cycle=0, rank=0, iteration=2),
        Event(fault="node_suspended", phase="evaluation", launch=0, cycle=0, rank=1, iteration=4),
        Event(fault="disk_full", phase="save", launch=0, cycle=0, rank=0, iteration=6),
        Event(fault="launcher_killed", phase="rendezvous", launch=0, cycle=1, rank=0),
        Event(fault="server_killed", phase="load", launch=1, cycle=0, rank=1),
    ),
}


@pytest.fixture(scope="module")
def weights() -> Iterator[str]:
    """The hash of those of a run without a fault."""
    plan = Plan(seed=0, layout="dp", preload="megatron", learns=False)
    yield perform(plan, "").weights or ""
    forked_launcher.end([MEGATRON])


def perform(plan: Plan, weights: str) -> Seen:
    with Run(plan, clock_library=None, forks=True) as run:
        seen = run.perform(weights)
        said = run.output()
    run.remove()
    print(said)  # shown where the test fails
    return seen


@pytest.mark.parametrize("what", EVENTS)
def test_job_survives_each_kind_of_fault(weights: str, what: str) -> None:
    plan = Plan(seed=0, layout="dp", preload="megatron", learns=False, events=EVENTS[what])
    if plan.needs_small_disk and os.geteuid() != 0:
        pytest.skip("a small file system needs root")
    assert weights
    assert problems(perform(plan, weights)) == []
