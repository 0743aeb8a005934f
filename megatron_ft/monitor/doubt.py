"""A learned timeout is over: the launcher says whether its rank is ended, once all ranks were looked at twice."""

from __future__ import annotations

import time

from megatron_ft.core.board.hang_detector import Overdue
from megatron_ft.core.diagnosis.movement import Glance, progress_between
from megatron_ft.core.diagnosis.rank_snapshot import LOOK_S
from megatron_ft.core.messages.monitor import Convict, GiveTime, LookTwice
from megatron_ft.monitor.glance import glance
from megatron_ft.monitor.reports import Reports
from megatron_ft.monitor.watched_rank import WatchedRank

__all__ = ["Doubt"]

_ANSWER_NS = round((LOOK_S + 1.0) * 1e9)
"""If the launcher says nothing for so long, the rank is ended, as one whose timeout was configured."""


class Doubt:
    """Of one monitor. ``has_launcher``: somebody who looks at the other ranks, too."""

    def __init__(self, reports: Reports, *, has_launcher: bool) -> None:
        self._reports = reports
        self._has_launcher = has_launcher
        self._verdict: Overdue | None = None
        self._answer_by_ns = 0
        self._is_convicted = False
        self._first: Glance | None = None
        self._again_ns = 0

    @property
    def due_ns(self) -> int | None:
        """When ``act`` is to be called at the latest."""
        times = [] if self._first is None else [self._again_ns]
        if self._verdict is not None and not self._is_convicted:
            times.append(self._answer_by_ns)
        return min(times, default=None)

    def puts_off(self, watched: WatchedRank, verdict: Overdue) -> bool:
        """Whether the launcher is asked first; else the rank is to be ended now."""
        was_convicted, self._is_convicted = self._is_convicted, False
        if not (verdict.is_learned and self._has_launcher) or was_convicted:
            self._verdict = None
            return False
        if self._verdict is not None and self._verdict.since_ns == verdict.since_ns:
            return True  # it has been asked
        self._verdict, self._answer_by_ns = verdict, time.monotonic_ns() + _ANSWER_NS
        self._reports.suspect(watched.attached, verdict)
        return True

    def clear(self) -> None:
        """Nobody is suspected any more."""
        self._verdict, self._is_convicted = None, False

    def forget(self) -> None:
        """The rank is gone."""
        self.clear()
        self._first = None

    def obey(self, watched: WatchedRank, order: LookTwice | GiveTime | Convict) -> bool:
        """Do what the launcher says; whether the rank is to be judged now."""
        match order:
            case LookTwice(again_ns=again_ns):
                self._first, self._again_ns = glance(watched.attached, watched.final_snapshot()), again_ns
            case GiveTime(timeout_s=timeout_s) if self._verdict is not None:
                watched.give_time(self._verdict, timeout_s)
                self.clear()
                return True
            case Convict():
                return self._convict()
        return False

    def _convict(self) -> bool:
        """Let the next reading decide, if it shows what the rank is suspected for; whether there is anything."""
        self._is_convicted = self._verdict is not None
        return self._is_convicted

    def act(self, watched: WatchedRank) -> bool:
        """Do what is due; whether the rank is convicted, because nobody has said anything else."""
        now_ns = time.monotonic_ns()
        if self._first is not None and now_ns >= self._again_ns:
            second = glance(watched.attached, watched.final_snapshot())
            self._reports.looked_twice(watched.attached, progress_between(self._first, second))
            self._first = None
        return self._verdict is not None and now_ns >= self._answer_by_ns and self._convict()
