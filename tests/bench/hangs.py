"""From the deadline of a rank that hangs in a section to the first step of the new cycle.

Ours and nvidia-resiliency-ext, each with its own client and a monitor as it comes; torchrun doesn't notice a hang.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.bench.figures import Row, compare, middle
from tests.bench.jobs import SCRIPTS, Job, interleaved, progress
from tests.bench.stamps import Stamp, phases

__all__ = ["measure", "rows"]

TIMEOUT_S = 1.0
START_S = 60.0
RECOVERY_S = 60.0
STEPS, UNDER_WAY_S = 10, 2.0
MOST_RUNS = 5
"""A hang costs the reference half a minute now and then."""
BUDGET_S = 150.0
POLLS_EVERY_S = 5.0
"""The reference looks so often, counted from the start: the hangs are spread over that time."""
OPTIONS = {
    "ours": ("--ft-param-rank_section_timeouts", f"step: {TIMEOUT_S:g}"),
    "reference": ("--ft-rank-section-timeouts", f"step:{TIMEOUT_S:g}"),
}


def measure(launchers: Sequence[str], reference: str, runs: int) -> dict[str, Any]:
    """By launcher."""
    able = [launcher for launcher in launchers if launcher in OPTIONS]
    found: dict[str, list[dict[str, Any] | None]] = {launcher: [] for launcher in able}
    runs = min(runs, MOST_RUNS)
    for run, launcher in interleaved(runs, able, BUDGET_S):
        restart = hang_once(launcher, reference, UNDER_WAY_S + POLLS_EVERY_S * run / runs)
        found[launcher].append(restart)
        told = f"{restart['step']:.3f} s beyond the timeout" if restart else "not recovered"
        progress(f"hang, {launcher}, run {run + 1} of {runs}: {told}")
    return {
        launcher: {"after_timeout": middle(of), "recovered": sum(r is not None for r in of), "runs": of}
        for launcher, of in found.items()
    }


def hang_once(launcher: str, reference: str, under_way_s: float) -> dict[str, Any] | None:
    """One job, one rank that stops itself. Seconds after the deadline; None if it doesn't recover."""
    command = [str(SCRIPTS / "hanging.py"), launcher, str(STEPS), str(under_way_s)]
    with Job(launcher, command, reference=reference, options=OPTIONS[launcher]) as job:
        hung_at = job.wait_for(hang_of, START_S)
        if hung_at is None:
            progress(f"hang, {launcher}: no hang\n{job.tail()}")
            return None
        deadline = hung_at + TIMEOUT_S
        restart = job.wait_for(lambda stamps: phases(stamps, deadline, job.ranks), TIMEOUT_S + RECOVERY_S)
        return None if restart is None else {**restart, "load": os.getloadavg()[0]}


def hang_of(stamps: Sequence[Stamp]) -> float | None:
    """When it began."""
    return next((stamp.at for stamp in stamps if stamp.event == "hang"), None)


def rows(result: dict[str, Any]) -> list[Row]:
    """For the table."""
    table = []
    for phase, what in (("user", "user code"), ("step", "first step")):
        figures = {launcher: found["after_timeout"].get(phase) for launcher, found in result.items()}
        table.append(compare(f"hang to {what}, after its timeout of {TIMEOUT_S:g} s", "s", figures))
    runs = max(len(found["runs"]) for found in result.values())
    recovered = {launcher: found["recovered"] for launcher, found in result.items()}
    table.append(compare("recovered from a hang (torchrun: can't)", f"of {runs}", recovered, is_compared=False))
    return table
