"""Ways out of torch's agent that are no failure of this node's ranks."""

from __future__ import annotations

from megatron_ft.core.errors import FaultToleranceError

__all__ = ["AlreadyFinishedError", "CycleOverError", "JobOverError"]


class CycleOverError(FaultToleranceError):
    """What was about to be done for the next cycle isn't wanted any more."""


class JobOverError(FaultToleranceError):
    """This launcher's part in the job is over; everything there is to say of that was said."""


class AlreadyFinishedError(FaultToleranceError):
    """The job had finished before this launcher came; the text says so."""
