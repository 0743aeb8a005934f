"""Records of a launcher on ranks that hang, or may: what their monitors can't know alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.codec import Cycle, LocalRank, Rank, Seconds

__all__ = ["Finding", "MoreTime", "NoCollective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a hang diagnosis: which rank hung. One launcher of the job writes it.

    Args:
        text: in words.
    """

    cycle: Cycle
    rank: Rank | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreTime:
    """A learned timeout was over, but a rank made progress: this one isn't terminated yet.

    Args:
        kind, section: what was overdue, as in a ``verdict``.
        elapsed_s: for how long it had lasted.
        timeout_s: what was learned.
        until_s: how long it may last now, since it began.
        progress: who was seen to do what, in words.
    """

    rank: Rank
    cycle: Cycle
    kind: str
    section: str | None = None
    local_rank: LocalRank | None = None
    iteration: int | None = None
    elapsed_s: Seconds | None = None
    timeout_s: Seconds | None = None
    until_s: Seconds | None = None
    progress: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCollective:
    """No collective has completed on any rank for long, in a job whose script calls no hooks. One launcher writes it.

    Args:
        rank: that keeps the others waiting; null if that isn't known, or no rank waits.
        elapsed_s: for so long, when the ranks were examined.
        text: in words: who, where it is, and what the others do.
        ends: the cycle is ended for it (--ft-watch-collectives end).
    """

    cycle: Cycle
    rank: Rank | None = None
    elapsed_s: Seconds
    timeout_s: Seconds
    text: str = ""
    ends: bool = False
