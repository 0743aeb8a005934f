"""What a launcher and its monitors say to each other. Much of what a monitor tells is a record of its log, too."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ft.core.diagnosis.rank_snapshot import RankNote
from megatron_ft.core.messages.codec import Vocabulary
from megatron_ft.core.messages.fields import Cycle, Moment, Pid, Seconds
from megatron_ft.core.records.monitor import Attached, Detached, FirstStep, Signalled
from megatron_ft.core.records.shared import Verdict, Warning_

__all__ = [
    "Suspect",
    "LookedTwice",
    "LookTwice",
    "GiveTime",
    "Convict",
    "ORDERS",
    "REPORTS",
    "Collect",
    "Order",
    "Pause",
    "RankStarted",
    "Release",
    "Report",
    "Resume",
    "Seen",
    "Stop",
]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a rank that was looked at."""

    cycle: Cycle
    note: RankNote


@dataclass(frozen=True, slots=True)
class Suspect:
    """A learned timeout is over: the rank is ended if the launcher convicts it, or says nothing for some seconds."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LookedTwice:
    """What the rank has done between two looks, in words; empty: nothing that could be seen."""

    cycle: Cycle
    progress: str = ""


Report = Attached | Detached | FirstStep | Verdict | Suspect | LookedTwice | Seen | Signalled | Warning_
REPORTS: Vocabulary[Report] = Vocabulary(Report)


@dataclass(frozen=True, slots=True)
class RankStarted:
    """The rank's process was made; it leads its own group and session."""

    pid: Pid


@dataclass(frozen=True, slots=True)
class Collect:
    """Look at the rank of this cycle, until ``deadline_ns`` at the latest; ``passive``: it may go on living."""

    cycle: Cycle
    deadline_ns: Moment
    passive: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Everything has been seen: the rank of this cycle may be ended, if it was found hung."""

    cycle: Cycle


@dataclass(frozen=True, slots=True)
class LookTwice:
    """Look at the rank of this cycle now and at ``again_ns``, without a signal to it: does it make progress?"""

    cycle: Cycle
    again_ns: Moment


@dataclass(frozen=True, slots=True)
class GiveTime:
    """Somebody makes progress: what the rank is suspected for may last ``timeout_s`` in all."""

    cycle: Cycle
    timeout_s: Seconds


@dataclass(frozen=True, slots=True)
class Convict:
    """Nobody makes progress: end the rank of this cycle, if what it is suspected for still lasts."""

    cycle: Cycle


@dataclass(frozen=True, slots=True)
class Pause:
    """Judge no rank from now on, or from ``since_ns`` on."""

    since_ns: Moment | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Judge again; the time since the pause counts for no rank."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The job is over."""


Order = RankStarted | Collect | Release | LookTwice | GiveTime | Convict | Pause | Resume | Stop
ORDERS: Vocabulary[Order] = Vocabulary(Order)
