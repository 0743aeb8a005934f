"""What a rank may ask of its launcher."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["WorkloadAction", "WorkloadControlRequest"]


class WorkloadAction(enum.Enum):
    """What the launcher is asked to do when the worker group ends. The numbers are those of nvidia-resiliency-ext."""

    Continue = 0
    """Nothing special: the restart policy decides, as if nobody had asked."""
    ExcludeThisNode = 1
    """Restart, but without the node the request came from."""
    ShutdownWorkload = 2
    """Don't restart: end the whole job."""


@dataclass
class WorkloadControlRequest:
    """A request and the reason for it, one line that the launcher prints."""

    action: WorkloadAction
    description: str = ""
