"""How an iteration is named in a line. Inside, iterations count from 0, and a rank reports each when it begins.

So a rank that has reported 25 has done 25. Megatron-LM counts from 1 and logs an iteration when it is over: the last
one in its log is "iteration 25" then, and the next one, 26 there, has begun. "After iteration 25" is true in both.
"""

from __future__ import annotations

__all__ = ["begins", "when"]


def when(iteration: int) -> str:
    """Where a rank was that had reported this iteration: ``after iteration 25``."""
    return "in the first iteration" if iteration == 0 else f"after iteration {iteration}"


def begins(iteration: int) -> str:
    """What a rank said when it reported this iteration: ``iteration 26 begins``."""
    return f"iteration {iteration + 1} begins"
