"""What a rank may ask of its launcher."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WorkloadAction(enum.Enum):
    """What the launcher is asked to do when the worker group ends. The numbers are those of nvidia-resiliency-ext."""

    Continue = 0
    """Nothing special: the restart policy decides, as without a request."""
    ExcludeThisNode = 1
    """Restart, but without the node the request came from."""
    ShutdownWorkload = 2
    """Don't restart: end the whole job."""


@dataclass
class WorkloadControlRequest:
    """A request and the reason for it, one line that the launcher prints."""

    action: WorkloadAction
    description: str = ""


@dataclass(frozen=True)
class ReceivedRequest:
    """What a rank asked for; the description is one line."""

    action: WorkloadAction
    description: str
    rank: int | None
    pid: int

    @property
    def text(self) -> str:
        """Who asked for what, in words."""
        who = f"process {self.pid}" if self.rank is None else f"rank {self.rank}"
        text = f"{who} asked for {self.action.name}"
        return f"{text}: {self.description}" if self.description else text
