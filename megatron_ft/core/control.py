"""Requests of a rank to its launcher."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class WorkloadAction(enum.Enum):
    """Action when the worker group ends. The numbers are those of nvidia-resiliency-ext."""

    Continue = 0
    """The restart policy decides, as without a request."""
    ExcludeThisNode = 1
    """Restart without the node of the request."""
    ShutdownWorkload = 2
    """Don't restart: end the whole job."""


@dataclass
class WorkloadControlRequest:
    """A request and its reason, one line that the launcher prints."""

    action: WorkloadAction
    description: str = ""


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as received; the description is one line."""

    action: WorkloadAction
    description: str
    rank: int | None
    pid: int

    @property
    def text(self) -> str:
        """The request in words."""
        who = f"process {self.pid}" if self.rank is None else f"rank {self.rank}"
        text = f"{who} asked for {self.action.name}"
        return f"{text}: {self.description}" if self.description else text
