"""What a monitor tells the launcher, as an event of the launcher's machine."""

from __future__ import annotations

import signal
import time

from megatron_ft.core.agent import edge
from megatron_ft.core.diagnosis.exits import HangVerdict
from megatron_ft.core.messages.monitor import Observation, ProgressChecked, Report, Suspect
from megatron_ft.core.records.monitor import Attached, Detached, FirstStep, Signalled
from megatron_ft.core.records.shared import RankHung

__all__ = ["event_of"]


def event_of(local_rank: int, report: Report) -> edge.FromMonitor | None:
    """None: it says nothing of a rank."""
    match report:
        case Attached():
            known = report.at_ns, report.user_code_ns, report.has_group, report.watch_only
            return edge.Attached(local_rank, report.cycle, *known)
        case Detached():
            return edge.Detached(local_rank, report.cycle, report.at_ns or time.monotonic_ns())
        case FirstStep():
            return edge.Trains(local_rank, report.cycle, report.began_ns or 0, report.at_ns)
        case Observation():
            return edge.EvidenceCollected(local_rank, report.cycle, report.note)
        case Suspect(verdict):
            return edge.Suspected(local_rank, verdict.cycle, _verdict(local_rank, verdict))
        case ProgressChecked(cycle, progress):
            return edge.ProgressChecked(local_rank, cycle, progress)
        case RankHung():
            return edge.FoundHung(local_rank, report.cycle, _verdict(local_rank, report), report.observed_only)
        case Signalled():
            number = signal.Signals.__members__.get(report.signal)
            return None if number is None else edge.Signalled(local_rank, number)
    return None


def _verdict(local_rank: int, verdict: RankHung) -> HangVerdict:
    return HangVerdict(
        rank=verdict.rank,
        local_rank=local_rank,
        kind=verdict.kind,
        section=verdict.section,
        elapsed_s=verdict.elapsed_s,
        timeout_s=verdict.timeout_s,
        iteration=verdict.iteration,
        at_ns=verdict.at_ns,
        stopped=verdict.state == "T",
        learned=verdict.learned,
        learned_timeout_s=verdict.learned_timeout_s,
    )
