"""Ways in which the job ends on this node that are no failure of its own ranks."""

from __future__ import annotations

from megatron_ft.core.errors import FaultToleranceError

__all__ = ["CycleOverError", "JobEndedError", "JobLeftError", "NodeExcludedError"]


class JobEndedError(FaultToleranceError):
    """The job ends, and no failure of this node's ranks is why: a rank asked for it, or other nodes failed."""


class CycleOverError(FaultToleranceError):
    """The cycle has ended before the ranks of this node were started."""


class JobLeftError(FaultToleranceError):
    """The job has ended, or goes on, without this node: with the launcher's exit code, and why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class NodeExcludedError(FaultToleranceError):
    """This node leaves, because a rank asked for it or can't be ended. ``job_ends``: the others are too few without."""

    def __init__(self, *, job_ends: bool) -> None:
        super().__init__("this node was left out")
        self.job_ends = job_ends
