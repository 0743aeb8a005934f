"""Requests of a rank to its launcher."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Any

from megatron_ft.core.codec import Form, Pid
from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.wording import shown

_MAX_RANK = 10**7


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


def _action(name: Any) -> WorkloadAction:
    if type(name) is not str or name not in WorkloadAction.__members__:
        raise ProtocolError(shown(name))
    return WorkloadAction[name]


def _rank_or_none(rank: Any) -> int | None:
    return rank if type(rank) is int and 0 <= rank <= _MAX_RANK else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadControl:
    """A rank sent a request to the launcher.

    Args:
        action: "Continue", "ExcludeThisNode" or "ShutdownWorkload".
        rank: as the process says; null if it says none.
        pid: of the process, as the kernel tells.
    """

    action: Annotated[WorkloadAction, Form(_action, lambda action: action.name, "text")]
    description: str = ""
    rank: Annotated[int | None, Form(_rank_or_none, lambda rank: rank, "global rank, or null")] = None
    pid: Pid | None = None

    @property
    def text(self) -> str:
        """The request in words."""
        who = f"process {self.pid}" if self.rank is None else f"rank {self.rank}"
        text = f"{who} asked for {self.action.name}"
        return f"{text}: {self.description}" if self.description else text
