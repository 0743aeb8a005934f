"""From the death of a rank to the first step of the new cycle, and from the launch to the first step of all.

Rank 1 is killed when the job is well under way. Times are those at which the last rank passes a phase.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.figures import Row, compare, middle
from tests.bench.jobs import ROOT, SCRIPTS, Job, interleaved, progress, pss_mib
from tests.bench.stamps import Stamp, last_pids, phases, steps_done

__all__ = ["measure", "rows"]

START_S = 60.0
RECOVERY_S = 60.0
BUDGET_S = 420.0
"""For the runs of one script under all launchers."""


@dataclass(frozen=True)
class Script:
    """What is run, and how many steps it has done when its rank is killed."""

    what: str
    command: tuple[str, ...]
    steps: int = 10
    for_others: tuple[str, ...] = ()
    """Arguments under launchers that aren't ours."""


GPT = (
    *(str(SCRIPTS / "gpt.py"), str(ROOT / "examples"), "--save", "{directory}/checkpoints", "--save-interval", "10"),
    *("--train-iters", "1000000", "--eval-interval", "0", "--log-interval", "1000000"),
)
ALL = {
    "bare": Script("bare script", (str(SCRIPTS / "bare.py"),)),
    "megatron": Script("with megatron imported", (str(SCRIPTS / "with_megatron.py"),)),
    # two saves: the one that is loaded again is final
    "train_gpt": Script("train_gpt, with its checkpoint", GPT, steps=25, for_others=("--no-ft",)),
}


def measure(launchers: Sequence[str], reference: str, runs: int) -> dict[str, Any]:
    """By script and launcher."""
    result: dict[str, Any] = {}
    for name, script in ALL.items():
        found: dict[str, list[dict[str, Any]]] = {launcher: [] for launcher in launchers}
        for run, launcher in interleaved(runs, launchers, BUDGET_S):
            found[launcher].append(kill_once(launcher, script, reference))
            progress(f"restart, {script.what}, {launcher}, run {run + 1} of {runs}: {said(found[launcher][-1])}")
        result[name] = {launcher: summary(of) for launcher, of in found.items()}
    return result


def kill_once(launcher: str, script: Script, reference: str) -> dict[str, Any]:
    """One job, one SIGKILL."""
    command = [*script.command, *(script.for_others if launcher != "ours" else ())]
    run: dict[str, Any] = {"launch": None, "restart": None, "after": None, "load": os.getloadavg()[0]}
    with Job(launcher, command, reference=reference) as job:
        run["launch"] = job.wait_for(lambda stamps: phases(stamps, job.began, job.ranks), START_S)
        if run["launch"] is not None and job.wait_for(lambda stamps: under_way(stamps, script), START_S):
            victim = last_pids(job.stamps())[1]
            since = time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it died by itself: what comes of it says the same
                os.kill(victim, signal.SIGKILL)
            run["restart"] = job.wait_for(lambda stamps: phases(stamps, since, job.ranks), RECOVERY_S)
        if run["restart"] is None:
            run["output"] = job.tail()
        else:
            run["after"] = memory(job)
    return run


def under_way(stamps: Sequence[Stamp], script: Script) -> bool | None:
    """True after enough steps of all ranks; None until then."""
    return True if steps_done(stamps, last_pids(stamps)) >= script.steps else None


def memory(job: Job) -> dict[str, float]:
    """MiB: the mean of the ranks, and all that belongs to the job."""
    pids = last_pids(job.stamps())
    return {"rank_mib": sum(pss_mib(pid) for pid in pids.values()) / len(pids), "job_mib": job.pss_mib()}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs that got there, how many did, and the runs."""
    return {
        **{key: middle([run[key] for run in runs]) for key in ("launch", "restart", "after")},
        "recovered": sum(run["restart"] is not None for run in runs),
        "runs": runs,
    }


def said(run: dict[str, Any]) -> str:
    """For the progress line."""
    return f"{run['restart']['step']:.3f} s" if run["restart"] else "not recovered"


def rows(result: dict[str, Any]) -> list[Row]:
    """For the table: launches, restarts, memory."""

    def of(script: str, *path: str) -> dict[str, float | None]:
        found: dict[str, Any] = result[script]
        for key in path:
            found = {launcher: (figures or {}).get(key) for launcher, figures in found.items()}
        return found

    table = []
    for name in ("bare", "megatron"):
        for phase, what in (("user", "end of imports"), ("step", "first step")):
            table.append(compare(f"launch to {what}, {ALL[name].what}", "s", of(name, "launch", phase)))
    phase_names = (("user", "end of imports"), ("group", "process group"), ("step", "first step"))
    for name, script in ALL.items():
        for phase, what in phase_names:
            table.append(compare(f"kill to {what}, {script.what}", "s", of(name, "restart", phase)))
        runs = max(len(found["runs"]) for found in result[name].values())
        table.append(compare(f"recovered, {script.what}", f"of {runs}", of(name, "recovered"), is_compared=False))
    for name, script in ALL.items():
        table.append(compare(f"memory of a rank (PSS), {script.what}", "MiB", of(name, "after", "rank_mib")))
    table.append(compare("memory of the job, 2 ranks, bare script", "MiB", of("bare", "after", "job_mib")))
    return table
