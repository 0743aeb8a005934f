"""When the runs of one id began: a launcher that comes later belongs to a run that goes on, or begins another. Pure.

A launcher whose ranks train writes nothing for minutes, or hours if these call no hooks; one that was killed never
writes that it has ended. Which of the two it is shows in what the launchers after it do.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.cli.logs.read import EventLogFile
from megatron_ft.core.records import launcher as records

__all__ = ["run_begins"]

_QUIET_NS = 86_400_000_000_000
_QUIET_WITH_HOOKS_NS = 3_600_000_000_000
"""So long after its last record a run is over in any case. What ranks do that call hooks is recorded every 30 s, but
some sections take long."""
_ALONE = "alone"


def run_begins(files: Sequence[EventLogFile]) -> list[int]:
    """Wall ns, oldest first; the logs are of one run id."""
    begins: list[int] = []
    run: list[_Launcher] = []
    others = [log for log in files if log.header.role != "launcher"]
    for log in sorted((log for log in files if log.header.role == "launcher"), key=lambda log: log.header.wall_ns):
        launcher = _Launcher(log)
        if not run or not _goes_on(run, launcher, others):
            begins.append(launcher.opened_ns)
            run = []
        run.append(launcher)
    return begins


class _Launcher:
    """What its log says; wall ns."""

    def __init__(self, log: EventLogFile) -> None:
        self.opened_ns = log.header.wall_ns
        self.last_ns = _last_ns(log)
        self.ended_ns: int | None = None
        self.was_asked = False
        """To leave the job, which may go on without it."""
        self.meeting = records.Meeting()
        self.cycles: list[tuple[int, int]] = []
        """Each that it had a part in, and when it was begun."""
        for entry in log.entries:
            at_ns = entry.t + log.wall_offset_ns
            match entry.record:
                case records.CycleStarted(cycle=cycle):
                    self.cycles.append((cycle, at_ns))
                case records.Meeting() as meeting:
                    self.meeting = meeting
                case records.StopRequested() | records.Abandoned():
                    self.was_asked = True
                case records.RunEnded():
                    self.ended_ns = at_ns


def _goes_on(run: Sequence[_Launcher], launcher: _Launcher, others: Sequence[EventLogFile]) -> bool:
    """Whether that run hasn't ended when a launcher is started, which then takes part in it."""
    if launcher.opened_ns <= max(each.last_ns for each in run):
        return True
    rank = launcher.meeting.rank
    open_ = [each for each in run if each.ended_ns is None and (rank is None or each.meeting.rank != rank)]
    if not open_ or launcher.meeting.how == _ALONE:
        return False
    if launcher.cycles:  # each run counts from 0
        return min(launcher.cycles)[0] > max((cycle for each in run for cycle, _ in each.cycles), default=0)
    begun_ns = max((at_ns for each in run for _, at_ns in each.cycles), default=0)
    if any(each.ended_ns is not None and each.ended_ns > begun_ns and not each.was_asked for each in run):
        return False  # who isn't asked to leave stays until the end of the job: the silent ones were killed
    of_ranks = [log for log in others if run[0].opened_ns <= log.header.wall_ns < launcher.opened_ns]
    newest_ns = max([*(each.last_ns for each in run), *map(_last_ns, of_ranks)])
    call_hooks = any(log.progress for log in of_ranks)
    return launcher.opened_ns - newest_ns < (_QUIET_WITH_HOOKS_NS if call_hooks else _QUIET_NS)


def _last_ns(log: EventLogFile) -> int:
    return log.newest + log.wall_offset_ns
