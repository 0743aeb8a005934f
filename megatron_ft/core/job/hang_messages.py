"""What launchers and the coordinator tell each other of ranks that hang, or may. The rest is in `core.job.messages`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.diagnosis.cycle_cause import HangVerdict
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.core.job.progress import Reached

__all__ = ["Hang", "Moving", "Notes", "Reviewed", "Suspected"]


@dataclass(frozen=True, slots=True)
class Hang:
    """A rank of this node was found hung: every node is to collect evidence. ``passive``: the ranks run on."""

    cycle: int
    verdict: HangVerdict
    reached: Reached | None = None
    passive: bool = False


@dataclass(frozen=True, slots=True)
class Notes:
    """What a node has seen of its ranks. ``passive``: as after a `Collect` that was; ``more``: the rest follows."""

    cycle: int
    notes: tuple[RankSnapshot, ...]
    passive: bool = False
    more: bool = False


@dataclass(frozen=True, slots=True)
class Suspected:
    """A learned timeout is over on this node: all others, to which the coordinator sends it, are to check progress."""

    cycle: int
    between_s: float


@dataclass(frozen=True, slots=True)
class Moving:
    """A rank of this node makes progress, and what it does, in words; the coordinator tells the others."""

    cycle: int
    progress: str


@dataclass(frozen=True, slots=True)
class Reviewed:
    """What all nodes have seen that were to look ``passive``-ly: why no collective completes.

    Args:
        asker: the place of the node that had asked for it.
        text: which rank keeps the others waiting and where it is, and what they do; or that none waits.
        rank: that rank; None if it isn't known.
        is_waited: some rank waits in a collective.
    """

    cycle: int
    asker: int
    elapsed_s: float
    timeout_s: float
    text: str
    rank: int | None = None
    is_waited: bool = False
