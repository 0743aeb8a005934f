"""What the launcher's machine is told of a rank by its monitor: events. Times as in `core.agent.edge`."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from megatron_ft.core.diagnosis.exits import HangVerdict
from megatron_ft.core.diagnosis.rank_snapshot import RankNote

__all__ = [
    "Attached",
    "Detached",
    "Evidence",
    "FoundHung",
    "FromMonitor",
    "LookedTwice",
    "Signalled",
    "Suspected",
    "Trains",
]


@dataclass(frozen=True, slots=True)
class Attached:
    """A rank has begun its monitoring, or its monitor was replaced by another (then ``at_ns`` is None).

    ``user_code_ns``: when the user's script began, in a rank that was forked; ``has_group``: it had its process group.
    """

    local_rank: int
    cycle: int
    at_ns: int | None
    user_code_ns: int | None = None
    has_group: bool = False
    watch_only: bool = False
    """Its script calls no hooks (so far): it can be looked at, and its collectives are counted."""


@dataclass(frozen=True, slots=True)
class Detached:
    """A rank has ended its monitoring."""

    local_rank: int
    cycle: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Trains:
    """A rank is through its first step, which began at ``began_ns`` (0 where that isn't known)."""

    local_rank: int
    cycle: int
    began_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class FoundHung:
    """A monitor's verdict. ``observed_only``: it has no consequences."""

    local_rank: int
    cycle: int
    verdict: HangVerdict
    observed_only: bool = False


@dataclass(frozen=True, slots=True)
class Suspected:
    """A learned timeout of a rank is over, and its monitor asks whether anybody makes progress."""

    local_rank: int
    cycle: int
    verdict: HangVerdict


@dataclass(frozen=True, slots=True)
class LookedTwice:
    """What a rank has done between the two looks of ``LookTwice``, in words; empty if nothing is known of."""

    local_rank: int
    cycle: int
    progress: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a monitor has seen of its rank."""

    local_rank: int
    cycle: int
    note: RankNote


@dataclass(frozen=True, slots=True)
class Signalled:
    """A monitor has sent its rank a signal."""

    local_rank: int
    number: signal.Signals


FromMonitor = Attached | Detached | Trains | FoundHung | Suspected | LookedTwice | Evidence | Signalled
