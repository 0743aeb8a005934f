"""Policy for the end of a step of srun: srun again, another start of the job, or the end. Pure."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.job.rules.lives import Ending, Life

_AT_ONCE = 3
"""Number of steps that may be lost in a row before the job should get other nodes."""


class BatchAction(enum.Enum):
    """Next action."""

    SRUN = "srun"
    """Run another step in the same allocation."""
    REQUEUE = "requeue"
    """Start the job again, later or on other nodes."""
    END = "end"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The user's limits: lives in all, failed lives in a row; ``nodes``: number needed for a step."""

    lives: int
    failures: int
    nodes: int


@dataclass(frozen=True, kw_only=True)
class After:
    """Facts after a step.

    Args:
        lives: all lives of the job; ``before``: their number when the step began.
        code: srun's exit code.
        asked: signal that asked this process to stop; empty without one.
        nodes: number of nodes left in the allocation.
        steps: number of steps started in this allocation.
    """

    lives: Sequence[Life]
    before: int
    code: int
    asked: str = ""
    nodes: int
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Next:
    """Next action, and why; ``code`` is this process's exit code if it ends."""

    action: BatchAction
    why: str
    code: int = 0


def decide(after: After, limits: Limits) -> Next:
    """Decide what follows: a life that has ended for good ends the job; else it goes on while lives are left."""
    life = after.lives[-1] if len(after.lives) > after.before else None
    ending = _ending(life, after.code)
    cause = f": {life.cause}" if life is not None and life.cause else ""
    told = f"life {_number(life, after.lives)} {_WORDS[ending]}{cause}"
    if ending is Ending.FINISHED:
        return Next(action=BatchAction.END, why=told)
    if ending in (Ending.MISTAKE, Ending.NO_PROGRESS):
        return Next(action=BatchAction.END, why=f"{told}; another start would end the same way", code=after.code or 1)
    if after.asked == "SIGINT":
        return Next(action=BatchAction.END, why=f"{told}; stopped by SIGINT", code=130)
    if len(after.lives) >= limits.lives:
        return Next(
            action=BatchAction.END, why=f"{told}; that was the last of {limits.lives} lives", code=after.code or 1
        )
    failures = itertools.takewhile(lambda each: each.outcome is Ending.FAILED, reversed(after.lives))
    if ending is Ending.FAILED and sum(1 for _ in failures) >= limits.failures:
        why = f"{told}; {limits.failures} lives in a row have failed"
        return Next(action=BatchAction.END, why=why, code=after.code or 1)
    if ending is Ending.STOPPED or after.asked:
        return Next(action=BatchAction.REQUEUE, why=f"{told}; there is more to train")
    if after.nodes < limits.nodes:
        return Next(
            action=BatchAction.REQUEUE, why=f"{told}; {after.nodes} of {limits.nodes} nodes are left in this allocation"
        )
    if after.steps >= _AT_ONCE:
        return Next(action=BatchAction.REQUEUE, why=f"{told}; {after.steps} steps were run in this allocation")
    return Next(action=BatchAction.SRUN, why=told)


_WORDS = {
    Ending.FINISHED: "has finished the training",
    Ending.STOPPED: "was stopped",
    Ending.FAILED: "has failed",
    Ending.NO_PROGRESS: "made no progress",
    Ending.MISTAKE: "did not start: mistake on the command line",
    Ending.LOST: "was lost",
    Ending.RUNNING: "was lost",
}


def _number(life: Life | None, lives: Sequence[Life]) -> int:
    """Return the life's number in ``result.json``, or the one it would have if its launchers had begun it."""
    if life is not None:
        return life.life or len(lives)  # 0: not numbered
    return max(lives[-1].life, len(lives)) + 1 if lives else 1


def _ending(life: Life | None, code: int) -> Ending:
    """Return how the life ended, by the exit code if the launchers couldn't record it."""
    if life is not None and life.outcome is not Ending.RUNNING:
        return life.outcome
    return Ending.MISTAKE if life is None and code == MISTAKE_CODE else Ending.LOST
