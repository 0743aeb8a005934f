"""A few runs of the chaos campaign: the example's job meets faults at odd moments and ends with the right weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.chaos import job
from tests.chaos.check import Seen, problems
from tests.chaos.one import Run
from tests.chaos.plan import Event, Plan
from tests.chaos.run import clock_library, undisturbed

# what no other test does to a job, in three runs
EVENTS = {
    "killed before and after it is final, then again before its first step": (
        Event(fault="rank_killed", phase="save", launch=0, cycle=0, rank=1, iteration=3),
        Event(fault="rank_killed", phase="written", launch=0, cycle=1, rank=0, iteration=3),
        Event(fault="exception", phase="load", launch=0, cycle=2, rank=1),
        Event(fault="segfault", phase="exit", launch=0, cycle=3, rank=0),
    ),
    "what hurts nobody, then a launcher that is killed in a restart": (
        Event(fault="clock_stepped", phase="setup", launch=0, cycle=0, rank=0),
        Event(fault="run_dir_removed", phase="step", launch=0, cycle=0, rank=1, iteration=1),
        Event(fault="board", phase="step", launch=0, cycle=0, rank=0, iteration=2),
        Event(fault="node_suspended", phase="evaluation", launch=0, cycle=0, rank=1, iteration=4),
        Event(fault="disk_full", phase="save", launch=0, cycle=0, rank=0, iteration=6),
        Event(fault="launcher_killed", phase="rendezvous", launch=0, cycle=1, rank=0),
        Event(fault="server_killed", phase="load", launch=1, cycle=0, rank=1),
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A directory, and the hash of the weights without a fault."""
    out = tmp_path_factory.mktemp("chaos")
    return out, undisturbed(out, ["dp"], None)


def perform(plan: Plan, place: tuple[Path, dict[str, str]], **environment: str) -> Seen:
    out, hashes = place
    library = clock_library(out) if plan.steps_clock else None
    with Run(plan, clock_library=library, environment=environment) as run:
        seen = run.perform(hashes[plan.layout])
        said = run.output()
    run.remove()
    print(said)  # shown where the test fails
    return seen


@pytest.mark.parametrize("what", EVENTS)
def test_the_job_comes_through(place: tuple[Path, dict[str, str]], what: str) -> None:
    plan = Plan(seed=0, layout="dp", preload="megatron", learns=False, events=EVENTS[what])
    if plan.steps_clock and shutil.which("cc") is None:
        pytest.skip("stepping the wall clock needs a C compiler")
    if plan.needs_small_disk and os.geteuid() != 0:
        pytest.skip("a small file system needs root")
    assert problems(perform(plan, place)) == []


def test_a_skipped_restore_is_caught(place: tuple[Path, dict[str, str]]) -> None:
    """Planted: the weights are right in the end all the same, because everything is computed once more."""
    events = (Event(fault="rank_killed", phase="step", launch=0, cycle=0, rank=1, iteration=5),)
    seen = perform(
        Plan(seed=0, layout="dp", preload="megatron", learns=False, events=events), place, **{job.SKIP_LOAD: "1"}
    )
    assert problems(seen) == ["cycle 1 of launch 0 began at iteration 0, though 3 was saved"] * 2
