"""Events of the launcher's machine: a monitor's reports on its rank. Times as in `core.agent.edge`."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from megatron_ft.core.diagnosis.cycle_cause import HangVerdict
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.core.timeouts.exchange import Intervals, Milestone


@dataclass(frozen=True, slots=True)
class Attached:
    """A rank has started its monitoring, or its monitor was replaced (then ``at_ns`` is None).

    ``user_code_ns``: start of the user's script, in a forked rank; ``has_group``: it had its process group.
    """

    local_rank: int
    cycle: int
    at_ns: int | None
    user_code_ns: int | None = None
    has_group: bool = False
    watch_only: bool = False
    """True if the script calls no hooks (so far): evidence can be collected on the rank, and its collectives are
    counted."""
    state_path: str = ""
    """File of learned timeouts; "" for none."""
    learns: bool = False
    """True if the script asks for learned timeouts (calc_ft_timeouts)."""


@dataclass(frozen=True, slots=True)
class Detached:
    """A rank has ended its monitoring."""

    local_rank: int
    cycle: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Trains:
    """A rank has completed its first step, which began at ``began_ns`` (0 if unknown)."""

    local_rank: int
    cycle: int
    began_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class FoundHung:
    """A monitor has found its rank hung.

    ``observed_only``: the rank is only reported (--ft-observe-only, or a timeout that isn't enforced).
    """

    local_rank: int
    cycle: int
    verdict: HangVerdict
    observed_only: bool = False


@dataclass(frozen=True, slots=True)
class Suspected:
    """A timeout of a rank is over, and its monitor asks whether any rank makes progress."""

    local_rank: int
    cycle: int
    verdict: HangVerdict


@dataclass(frozen=True, slots=True)
class ProgressChecked:
    """Progress of a rank between the two moments of ``CheckProgress``, in words; empty if none was found."""

    local_rank: int
    cycle: int
    progress: str


@dataclass(frozen=True, slots=True)
class EvidenceCollected:
    """Evidence that a monitor has collected on its rank."""

    local_rank: int
    cycle: int
    note: RankSnapshot


@dataclass(frozen=True, slots=True)
class Signalled:
    """A monitor has sent its rank a signal."""

    local_rank: int
    number: signal.Signals


@dataclass(frozen=True, slots=True)
class MilestoneReached:
    """A rank has reached a moment at which timeouts may be learned."""

    local_rank: int
    cycle: int
    milestone: Milestone


@dataclass(frozen=True, slots=True)
class IntervalsReported:
    """A monitor has answered a `Survey`."""

    local_rank: int
    cycle: int
    intervals: Intervals


FromMonitor = (
    Attached
    | Detached
    | Trains
    | FoundHung
    | Suspected
    | ProgressChecked
    | EvidenceCollected
    | Signalled
    | MilestoneReached
    | IntervalsReported
)
