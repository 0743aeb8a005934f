"""Policy for the end of a step of srun: srun again, another start of the job, or the end. Pure."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.job.rules.lives import Ending, Life

_AT_ONCE = 3
"""Number of steps that may be lost in a row before the job should get other nodes."""
_WORDS = {
    Ending.FINISHED: "has finished the training",
    Ending.STOPPED: "was stopped",
    Ending.FAILED: "has failed",
    Ending.NO_PROGRESS: "made no progress",
    Ending.MISTAKE: "did not start: mistake on the command line",
    Ending.LOST: "was lost",
    Ending.RUNNING: "was lost",
}


class BatchAction(enum.Enum):
    """Next action."""

    SRUN = "srun"
    """Run another step in the same allocation."""
    REQUEUE = "requeue"
    """Start the job again, later or on other nodes."""
    END = "end"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The user's settings, and the allocation."""

    job: str
    nodes: int
    """Number of nodes in the allocation."""
    needed: int
    """Number of nodes needed for a step."""
    max_lives: int
    max_failures: int
    """Number of failed lives in a row that ends the job."""
    log_dir: str
    launcher: tuple[str, ...]
    srun_options: tuple[str, ...]
    excludes_bad_nodes: bool


class Next(NamedTuple):
    """Next action, and why; ``code`` is this process's exit code if it ends."""

    action: BatchAction
    why: str
    code: int = 0


def decide(
    plan: Plan, lives: Sequence[Life], *, before: int, code: int, asked: str = "", nodes: int, steps: int = 1
) -> Next:
    """Decide what follows a step: a life that has ended for good ends the job; else it goes on while lives are left.

    Args:
        lives: all lives of the job; ``before``: their number when the step began.
        code: srun's exit code.
        asked: signal that asked this process to stop; empty without one.
        nodes: number of nodes left in the allocation.
        steps: number of steps started in this allocation.
    """
    life = lives[-1] if len(lives) > before else None
    # by the exit code if the launchers couldn't record the end
    ending = Ending.MISTAKE if life is None and code == MISTAKE_CODE else Ending.LOST
    number = max(lives[-1].life, len(lives)) + 1 if lives else 1
    if life is not None:
        ending = ending if life.outcome is Ending.RUNNING else life.outcome
        number = life.life or len(lives)  # 0: not numbered
    cause = f": {life.cause}" if life is not None and life.cause else ""
    told, own_code = f"life {number} {_WORDS[ending]}{cause}", code or 1
    if ending is Ending.FINISHED:
        return Next(BatchAction.END, told)
    if ending in (Ending.MISTAKE, Ending.NO_PROGRESS):
        return Next(BatchAction.END, f"{told}; another start would end the same way", own_code)
    if asked == "SIGINT":
        return Next(BatchAction.END, f"{told}; stopped by SIGINT", 130)
    if len(lives) >= plan.max_lives:
        return Next(BatchAction.END, f"{told}; that was the last of {plan.max_lives} lives", own_code)
    failures = itertools.takewhile(lambda each: each.outcome is Ending.FAILED, reversed(lives))
    if ending is Ending.FAILED and len([*failures]) >= plan.max_failures:
        return Next(BatchAction.END, f"{told}; {plan.max_failures} lives in a row have failed", own_code)
    if ending is Ending.STOPPED or asked:
        return Next(BatchAction.REQUEUE, f"{told}; there is more to train")
    if nodes < plan.needed:
        return Next(BatchAction.REQUEUE, f"{told}; {nodes} of {plan.needed} nodes are left in this allocation")
    if steps >= _AT_ONCE:
        return Next(BatchAction.REQUEUE, f"{told}; {steps} steps were run in this allocation")
    return Next(BatchAction.SRUN, told)
