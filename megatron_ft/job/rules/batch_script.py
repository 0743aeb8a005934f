"""A job of Slurm's that has lost its batch script's host, and goes on without a script (``--no-kill``): what is to be
done with it when a life has ended. Pure.

The script would have requeued the job, or have ended; without one Slurm keeps its nodes until the time limit.
"""

from __future__ import annotations

import re

from megatron_ft.job.rules.lives import Ending
from megatron_ft.link.base.hosts import expand_hosts

REQUEUES = "FT_SLURM_REQUEUES"
"""Set by a batch script that requeues this job where there is more to train (megatron-ft slurm)."""
_FOR_GOOD = (Ending.FINISHED, Ending.NO_PROGRESS, Ending.MISTAKE)


def requeue(job: str) -> list[str]:
    return ["scontrol", "requeue", job]


def show(job: str) -> list[str]:
    return ["scontrol", "--oneliner", "show", "job", job]


def in_its_place(told: str, job: str, ending: Ending, *, is_refused: bool) -> list[str]:
    """The command to run. ``told`` is what ``show`` has just printed; ``is_refused``: Slurm doesn't requeue the job.

    Empty where the job still has that host, as far as Slurm knows, or where Slurm is ending it.
    """
    found = dict(re.findall(r"(?:^|\s)(JobState|BatchHost|NodeList)=(\S*)", told))
    gone, hosts = found.get("BatchHost", ""), expand_hosts(found.get("NodeList", ""), most=100_000)
    if found.get("JobState") != "RUNNING" or not gone or gone in hosts:
        return []
    return ["scancel", job] if is_refused or ending in _FOR_GOOD else requeue(job)
