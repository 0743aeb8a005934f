"""Seconds from the death of a rank to the first step of all ranks in the next cycle, on one node of two ranks."""

from __future__ import annotations

import signal
import time
from typing import Any

from tests.bench.cluster import LAUNCHERS, SCRIPTS, Cluster, Stamp, progress
from tests.bench.figures import middle, shown, table

NAMES = {"ours": "megatron_ft", "torchrun": "torchrun", "reference": "nvidia-resiliency-ext 0.4.1"}
JOBS = {"a bare script": "steps.py", "Megatron imported": "steps_with_megatron.py"}
_RANKS, _STEPS, _BOUND_S = 2, 10, 60.0


def measure(reference: str | None, runs: int) -> dict[str, Any]:
    """Return the seconds of each run by job and launcher; None where the job did not train again."""
    launchers = [each for each in LAUNCHERS if each != "reference" or reference]
    found: dict[str, Any] = {}
    for job, script in JOBS.items():
        found[job] = {launcher: [] for launcher in launchers}
        for launcher in launchers * runs:  # interleaved: a slow minute of the machine hits all
            found[job][launcher].append(kill_once(launcher, script, reference))
        progress(f"restarts, {job}: {found[job]}")
    return found


def kill_once(launcher: str, script: str, reference: str | None) -> float | None:
    """Kill rank 1 of a job that is well under way; return the seconds until all ranks have made a step again."""
    command = [str(SCRIPTS / script)]
    with Cluster(launcher, command, nodes=1, ranks=_RANKS, reference=reference, options=(), variables={}) as job:

        def wait_for(since_s: float, steps: int) -> float | None:
            until_s = time.monotonic() + _BOUND_S
            while (at_s := trained(job.stamps(), since_s, steps)) is None and time.monotonic() < until_s:
                time.sleep(0.05)  # the times themselves are in the stamps
            return at_s

        if wait_for(0.0, _STEPS) is None:
            return None
        killed_s = time.monotonic()
        job.signal(1, signal.SIGKILL)
        again_s = wait_for(killed_s, 1)
        return None if again_s is None else again_s - killed_s


def trained(stamps: list[Stamp], since_s: float, steps: int) -> float | None:
    """Return when the last rank had done so many steps in a process that began after a time; None before that."""
    began = {stamp.pid for stamp in stamps if stamp.event == "user" and stamp.at >= since_s}
    at_s: dict[int, float] = {}
    for stamp in stamps:
        if stamp.pid in began and (stamp.event, stamp.number) == ("step", steps):
            at_s.setdefault(stamp.rank, stamp.at)
    return max(at_s.values()) if len(at_s) == _RANKS else None


def table_of(result: dict[str, Any]) -> str:
    rows = []
    for job, found in result.items():
        medians = {name: middle(of) for name, of in found.items()}
        for name, seconds in medians.items():
            ours = medians["ours"]
            ratio = seconds / ours if seconds is not None and ours else None
            recovered = f"{sum(each is not None for each in found[name])} of {len(found[name])}"
            rows.append([job, NAMES[name], shown(seconds, " s"), shown(ratio), recovered])
    return table(["kill of a rank to the next step", "launcher", "median", "times ours", "trained again"], rows)
