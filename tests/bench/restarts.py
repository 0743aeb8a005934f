"""From the death of a rank to the first step of the new cycle, and from the launch to the first step of all.

Rank 1 is killed when the job is well under way. Times are those at which the last rank passes a phase.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
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
PLAIN_RECOVERY_S = 20.0
"""For torchrun as it is, which hangs for minutes when it hangs."""


@dataclass(frozen=True)
class Script:
    """What is run, and how many steps it has done when its rank is killed."""

    what: str
    command: tuple[str, ...]
    steps: int = 10
    under_way_s: float = 0.0
    """After the first step."""
    for_others: tuple[str, ...] = ()
    """Arguments under launchers that aren't ours."""
    in_checkout: bool = False
    """megatron is a checkout on PYTHONPATH, not an installed package."""
    most_runs: int = 99


GPT = (
    *(str(SCRIPTS / "gpt.py"), str(ROOT / "examples"), "--save", "{directory}/checkpoints", "--save-interval", "10"),
    *("--train-iters", "1000000", "--eval-interval", "0", "--log-interval", "1000000"),
)
ALL = {
    "bare": Script("bare script", (str(SCRIPTS / "bare.py"),)),
    "megatron": Script("with megatron imported", (str(SCRIPTS / "with_megatron.py"),)),
    "checkout": Script("with a checkout of megatron", (str(SCRIPTS / "with_megatron.py"),), in_checkout=True),
    "after_a_minute": Script(
        "with megatron imported, after a minute", (str(SCRIPTS / "with_megatron.py"),), under_way_s=60.0, most_runs=2
    ),
    # two saves: the one that is loaded again is final
    "train_gpt": Script("train_gpt, with its checkpoint", GPT, steps=25, for_others=("--no-ft",)),
}


def measure(launchers: Sequence[str], reference: str, runs: int, plain_runs: int) -> dict[str, Any]:
    """By script and launcher; torchrun as it is only for whether it recovers."""
    result: dict[str, Any] = {}
    for name, script in ALL.items():
        found: dict[str, list[dict[str, Any]]] = {launcher: [] for launcher in launchers}
        for run, launcher in interleaved(min(runs, script.most_runs), launchers, BUDGET_S):
            found[launcher].append(kill_once(launcher, script, reference))
            progress(f"restart, {script.what}, {launcher}, run {run + 1} of {runs}: {said(found[launcher][-1])}")
        result[name] = {launcher: summary(of) for launcher, of in found.items()}
    plain = [
        kill_once("torchrun", ALL["bare"], reference, settles_rendezvous=False, recovery_s=PLAIN_RECOVERY_S)
        for _ in range(plain_runs)
    ]
    result["plain_torchrun"] = summary(plain)
    progress(f"restart, torchrun as it is: {result['plain_torchrun']['recovered']} of {plain_runs}")
    result["four_ranks"] = {launcher: of_four("bare", launcher, reference) for launcher in launchers}
    result["four_megatron"] = {launcher: of_four("megatron", launcher, reference) for launcher in launchers}
    return result


def kill_once(
    launcher: str,
    script: Script,
    reference: str,
    *,
    settles_rendezvous: bool = True,
    recovery_s: float = RECOVERY_S,
) -> dict[str, Any]:
    """One job, one SIGKILL."""
    command = [*script.command, *(script.for_others if launcher != "ours" else ())]
    run: dict[str, Any] = {"launch": None, "restart": None, "before": None, "after": None, "load": os.getloadavg()[0]}
    settled = {"settles_rendezvous": settles_rendezvous}
    with checkout(script) as path, Job(launcher, command, reference=reference, path=path, **settled) as job:
        run["launch"] = job.wait_for(lambda stamps: phases(stamps, job.began, job.ranks), START_S)
        if run["launch"] is not None and job.wait_for(lambda stamps: under_way(stamps, script, job), START_S):
            victim = last_pids(job.stamps())[1]
            run["before"] = memory(job)
            since = time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it died by itself: what comes of it says the same
                os.kill(victim, signal.SIGKILL)
            run["restart"] = job.wait_for(lambda stamps: phases(stamps, since, job.ranks), recovery_s)
        if run["restart"] is None:
            run["output"] = job.tail()
        else:
            run["after"] = memory(job)
    return run


@contextlib.contextmanager
def checkout(script: Script) -> Iterator[list[str]]:
    """What comes first on PYTHONPATH: a copy of megatron, as a user's own directory, if the script is to have one."""
    if not script.in_checkout:
        yield []
        return
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as directory:
        shutil.copytree(next(iter(spec.submodule_search_locations)), f"{directory}/megatron")
        yield [directory]


def under_way(stamps: Sequence[Stamp], script: Script, job: Job) -> bool | None:
    """True after enough steps of all ranks, and long enough after the first one; None until then."""
    first = min(stamp.at for stamp in stamps if stamp.event == "step")
    is_enough = steps_done(stamps, last_pids(stamps)) >= script.steps
    return True if is_enough and time.monotonic() > first + script.under_way_s else None


def memory(job: Job) -> dict[str, float]:
    """MiB: the mean of the ranks, and all that belongs to the job."""
    pids = last_pids(job.stamps())
    return {"rank_mib": sum(pss_mib(pid) for pid in pids.values()) / len(pids), "job_mib": job.pss_mib()}


def of_four(name: str, launcher: str, reference: str) -> dict[str, float] | None:
    """Memory with four ranks, under way, and how long they took to get there."""
    with Job(launcher, ALL[name].command, reference=reference, ranks=4) as job:
        launch = job.wait_for(lambda stamps: phases(stamps, job.began, 4), START_S)
        if launch is None:
            return None
        job.wait_for(lambda stamps: under_way(stamps, ALL[name], job), START_S)
        return {**memory(job), "launch": launch["step"]}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs that got there, how many did, and the runs."""
    return {
        **{key: middle([run[key] for run in runs]) for key in ("launch", "restart", "before", "after")},
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
    for name in ("bare", "megatron", "checkout"):
        for phase, what in (("user", "end of imports"), ("step", "first step")):
            table.append(compare(f"launch to {what}, {ALL[name].what}", "s", of(name, "launch", phase)))
    phase_names = (("user", "end of imports"), ("group", "process group"), ("step", "first step"))
    for name, script in ALL.items():
        for phase, what in phase_names:
            table.append(compare(f"kill to {what}, {script.what}", "s", of(name, "restart", phase)))
        runs = max(len(found["runs"]) for found in result[name].values())
        table.append(compare(f"recovered, {script.what}", f"of {runs}", of(name, "recovered"), is_compared=False))
    plain = result["plain_torchrun"]
    table.append(
        Row("recovered, torchrun as it is", f"of {len(plain['runs'])}", None, {"torchrun": plain["recovered"]})
    )
    for name, script in ALL.items():
        table.append(compare(f"memory of a rank (PSS), {script.what}", "MiB", of(name, "after", "rank_mib")))
    for key, what in (("four_ranks", "bare script"), ("four_megatron", "with megatron imported")):
        table.append(compare(f"launch to first step, 4 ranks, {what}", "s", of(key, "launch")))
        table.append(compare(f"memory of a rank (PSS), 4 ranks, {what}", "MiB", of(key, "rank_mib")))
    for ranks, what, figures in (
        (2, "bare script", of("bare", "after", "job_mib")),
        (4, "bare script", of("four_ranks", "job_mib")),
        (4, "with megatron imported", of("four_megatron", "job_mib")),
    ):
        table.append(compare(f"memory of the job, {ranks} ranks, {what}", "MiB", figures))
    return table
