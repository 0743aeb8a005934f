"""Requests of a rank to its launcher."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from megatron_ft.link.base.codec import Fact, Pid, Rank

_Action = Annotated[str, Meta(pattern="^(Continue|ExcludeThisNode|ShutdownWorkload)$")]


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


class WorkloadControl(Fact, frozen=True, kw_only=True):
    """A rank sent a request to the launcher.

    Args:
        action: "Continue", "ExcludeThisNode" or "ShutdownWorkload".
        rank: as the process says; null if it says none.
        pid: of the process, as the kernel tells.
    """

    action: _Action
    description: str = ""
    rank: Rank | None = None
    pid: Pid | None = None

    @property
    def text(self) -> str:
        """The request in words."""
        who = f"process {self.pid}" if self.rank is None else f"rank {self.rank}"
        text = f"{who} asked for {self.action}"
        return f"{text}: {self.description}" if self.description else text
