"""Goodput: a training that loses a rank again and again, beside one that nobody disturbs.

The same iterations, the same seeded faults for every launcher. What is lost is the restart and the iterations since
the last checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from tests.bench.figures import Row, compare
from tests.bench.jobs import SCRIPTS, Job, progress
from tests.bench.stamps import Stamp, last_pids, phases

__all__ = ["faults", "measure", "rows", "share"]

ITERATIONS, STEP_S, SAVE_INTERVAL = 300, 0.1, 10
FAULT_EVERY_S = 15.0
SEED = 1
START_S = 60.0
LIMIT_S = 150.0
"""For one training, several times what it needs undisturbed."""


def faults(seed: int, every_s: float, until_s: float, ranks: int) -> list[tuple[float, int]]:
    """(seconds after the first step, rank), about ``every_s`` apart."""
    chance = random.Random(seed)
    found: list[tuple[float, int]] = []
    at = 0.0
    while (at := at + every_s * chance.uniform(0.8, 1.2)) < until_s:
        found.append((at, chance.randrange(ranks)))
    return found


def measure(launchers: Sequence[str], reference: str) -> dict[str, Any]:
    """Once undisturbed, under torchrun: the pace doesn't depend on who started the ranks. Then each with faults."""
    undisturbed = train("torchrun", reference, [])
    if undisturbed["took_s"] is None:
        progress(f"goodput: the undisturbed training failed\n{undisturbed['output']}")
    plan = faults(SEED, FAULT_EVERY_S, LIMIT_S, ranks=2)
    result: dict[str, Any] = {"undisturbed": undisturbed, "disturbed": {}}
    for launcher in launchers:
        run = train(launcher, reference, plan)
        run["goodput"] = share(undisturbed["took_s"], run["took_s"])
        result["disturbed"][launcher] = run
        told = "not finished" if run["goodput"] is None else f"{run['goodput']:.1%}"
        progress(f"goodput, {launcher}: {told} with {run['faults']} faults")
    return result


def share(undisturbed_s: float | None, took_s: float | None) -> float | None:
    """Useful iterations over those that the undisturbed training does in the same time; both do equally many."""
    return None if undisturbed_s is None or took_s is None else undisturbed_s / took_s


def train(launcher: str, reference: str, plan: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """One training; ``took_s`` from its first step to its last, None if it doesn't get there."""
    command = [str(SCRIPTS / "checkpointed.py"), str(ITERATIONS), str(STEP_S), str(SAVE_INTERVAL)]
    run: dict[str, Any] = {"took_s": None, "faults": 0, "load": os.getloadavg()[0]}
    with Job(launcher, [*command, "{directory}/checkpoint"], reference=reference) as job:
        if job.wait_for(lambda stamps: phases(stamps, job.began, job.ranks), START_S) is not None:
            first = first_step(job.stamps())
            limit = first + LIMIT_S
            for after_s, rank in plan:
                due = min(first + after_s, limit)
                if job.wait_for(lambda stamps: last_step(stamps, job.ranks), due - time.monotonic()) is not None:
                    break
                run["faults"] += kill_rank(job, rank)
            last = job.wait_for(lambda stamps: last_step(stamps, job.ranks), limit - time.monotonic())
            run["took_s"] = None if last is None else last - first
            run["steps"] = sum(stamp.event == "step" for stamp in job.stamps()) / job.ranks
        if run["took_s"] is None:
            run["output"] = job.tail()
    return run


def kill_rank(job: Job, rank: int) -> bool:
    """SIGKILL for the latest process of the rank; whether it was there. A plan doesn't wait for a slow restart."""
    try:
        os.kill(last_pids(job.stamps())[rank], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def first_step(stamps: Sequence[Stamp]) -> float:
    """Of any rank."""
    return min(stamp.at for stamp in stamps if stamp.event == "step")


def last_step(stamps: Sequence[Stamp], ranks: int) -> float | None:
    """When the last rank has done the last iteration; None until then."""
    done = {stamp.rank: stamp.at for stamp in stamps if stamp.event == "step" and stamp.number == ITERATIONS}
    return max(done.values()) if len(done) == ranks else None


def rows(result: dict[str, Any]) -> list[Row]:
    """For the table."""
    runs = result["disturbed"]
    figures = {name: run["goodput"] and run["goodput"] * 100 for name, run in runs.items()}
    lost = {
        name: run["took_s"] - result["undisturbed"]["took_s"] if run["goodput"] and run["faults"] else None
        for name, run in runs.items()
    }
    each = {name: lost[name] and lost[name] / run["faults"] for name, run in runs.items()}
    return [
        compare(
            f"goodput, megatron imported, a rank killed every {FAULT_EVERY_S:g} s", "%", figures, more_is_better=True
        ),
        compare("time lost by each of these faults", "s", each),
    ]
