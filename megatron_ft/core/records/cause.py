"""Why a cycle ended: part of the record of its end, of a node's report and of the coordinator's verdict."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from megatron_ft.core.codec import Rank
from megatron_ft.core.wording import when


class CauseKind(enum.Enum):
    """What ended a cycle; the values stand in the event log."""

    HANG = "hang"
    CRASH = "crash"
    SIGNAL = "signal"
    REQUEST = "request"
    MEMBERSHIP = "membership"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a cycle ended.

    Args:
        rank: that caused it; null if none did, or if it isn't known.
        kind: "hang", "crash", "signal", "request", "membership".
        text: as the launcher prints it.
        detail: what the evidence adds; host: of the node whose fault it was. Empty if nothing is known.
        iteration: done by that rank.
        follows: it only follows from the end of another rank, on another node.
        by_us: the launcher or a monitor ended the rank, and no other end tells more.
    """

    rank: Rank | None = None
    kind: CauseKind = CauseKind.MEMBERSHIP
    text: str = ""
    detail: str = ""
    host: str = ""
    iteration: int | None = None
    follows: bool = False
    by_us: bool = False

    @property
    def line(self) -> str:
        """The text with the iteration, where it is known, and the detail."""
        line = self.text if self.iteration is None else f"{self.text} {when(self.iteration)}"
        return f"{line}, {self.detail}" if self.detail else line
