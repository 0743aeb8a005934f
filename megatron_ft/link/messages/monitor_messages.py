"""Messages between a launcher and its monitors. Most reports of a monitor are records, which the launcher logs."""

from __future__ import annotations

from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.learning.messages import Arm, Intervals
from megatron_ft.link.base.codec import Cycle, Message, Moment, Pid, Rank, Seconds, Vocabulary
from megatron_ft.link.facts import monitor
from megatron_ft.link.facts.monitor import Attached, Detached, FirstStep, Signalled
from megatron_ft.link.facts.shared import Evidence, RankHung, Warning_


class Observation(Message, frozen=True):
    """Evidence collected on a rank (`Collect`)."""

    cycle: Cycle
    note: RankSnapshot


class Suspect(Message, frozen=True):
    """A timeout is over: the rank is terminated if the launcher says so or doesn't answer for seconds.

    If the timeout isn't enforced, the rank is reported if the launcher says so, and never terminated.
    """

    verdict: RankHung

    @property
    def cycle(self) -> int:
        """Cycle of the rank."""
        return self.verdict.cycle


RankReport = Attached | Detached | FirstStep | RankHung | Suspect | Observation | Signalled | Intervals
"""These are about the rank of one cycle."""
Logged = monitor.Record | Evidence | RankHung | Warning_
"""The launcher writes these to the event log."""
Report = RankReport | Logged
REPORTS: Vocabulary[Report] = Vocabulary(Report)


class GuardGroup(Message, frozen=True):
    """End the process group that this process leads if the launcher dies: the rank's, just created.

    ``rank`` is its global rank, whatever number it gives itself later; None if unknown.
    """

    pid: Pid
    rank: Rank | None = None


class Collect(Message, frozen=True):
    """Collect evidence on the rank of this cycle until ``deadline_ns`` at the latest; ``passive``: it may run on.

    ``again_ns``: observe it now, collect the evidence then, and report what it has done meanwhile; None: at once.
    """

    cycle: Cycle
    deadline_ns: Moment
    passive: bool = False
    again_ns: Moment | None = None


class Release(Message, frozen=True):
    """All evidence is collected: the rank of this cycle may be terminated, if it was found hung."""

    cycle: Cycle


class ExtendTimeout(Message, frozen=True):
    """Answer to a `Suspect`: let the interval last ``timeout_s`` in all, because a rank makes progress.

    0: no rank does. If the interval still lasts, its rank hangs: it is terminated, or, if the timeout isn't enforced,
    reported.
    """

    cycle: Cycle
    timeout_s: Seconds = 0.0


class Pause(Message, frozen=True):
    """Suspend hang detection from now on, or from ``since_ns`` on. Requests to a launcher have no ``since_ns``."""

    since_ns: Moment | None = None


class Resume(Message, frozen=True):
    """Resume hang detection; timeouts exclude the time since the pause."""


class Stop(Message, frozen=True):
    """End: the job is over."""


RankOrder = Collect | Release | ExtendTimeout | Arm
"""Orders about one rank in one cycle."""
Order = GuardGroup | RankOrder | Pause | Resume | Stop
ORDERS: Vocabulary[Order] = Vocabulary(Order)
