"""What follows when a step of srun has ended: srun again, another start of the job, or the end. Pure."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.core.exit_codes import MISTAKE_CODE
from megatron_ft.core.job.lives import Ending, Life

_AT_ONCE = 3
"""So many steps of one allocation may be lost in a row before the job is to have other nodes."""


class BatchAction(enum.Enum):
    """What to do."""

    SRUN = "srun"
    """Another step in the same allocation."""
    REQUEUE = "requeue"
    """The job is to be started again, later or on other nodes."""
    END = "end"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The user's limits: lives in all, failed lives in a row; ``nodes``: needed for a step."""

    lives: int
    failures: int
    nodes: int


@dataclass(frozen=True, kw_only=True)
class After:
    """A step has ended.

    Args:
        lives: all of the job; ``before`` of them were there when the step began.
        code: srun's exit code.
        asked: this process was asked to stop, by this signal; empty if it wasn't.
        nodes: so many are left in the allocation.
        steps: so many were started in this allocation.
    """

    lives: Sequence[Life]
    before: int
    code: int
    asked: str = ""
    nodes: int
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Next:
    """What follows, and why; ``code`` is this process' exit code if it ends."""

    action: BatchAction
    why: str
    code: int = 0


def decide(after: After, limits: Limits) -> Next:
    """A life that has ended for good ends the job; else it goes on while there are lives left."""
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
    if ending is Ending.FAILED and _in_a_row(after.lives, Ending.FAILED) >= limits.failures:
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
    """Number of the life in ``result.json``, or the number it would have if its launchers had begun it."""
    if life is not None:
        return life.life or len(lives)  # 0: not numbered
    return max(lives[-1].life, len(lives)) + 1 if lives else 1


def _ending(life: Life | None, code: int) -> Ending:
    """Where the launchers couldn't say it, the exit code may."""
    if life is not None and life.outcome is not Ending.RUNNING:
        return life.outcome
    return Ending.MISTAKE if life is None and code == MISTAKE_CODE else Ending.LOST


def _in_a_row(lives: Sequence[Life], ending: Ending) -> int:
    return sum(1 for _ in itertools.takewhile(lambda life: life.outcome is ending, reversed(lives)))
