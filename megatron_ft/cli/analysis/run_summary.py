"""One run of a job: its accounting, and what only all of its logs tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.cli.logs.runs import RunLogs
from megatron_ft.core.facts.launcher import CycleStarted, RunEnded
from megatron_ft.core.hosts import natural
from megatron_ft.records.rules.accounting import Accounting, CycleSummary, account


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of a job.

    Args:
        begin_ns: start of its first launcher, nanoseconds since the epoch.
        exit_code: of the launcher (the largest, if nodes differ); None if it isn't in the logs.
        passed_over: lines of its logs that couldn't be read.
        missing_ranks: of the last cycle, those whose launchers' logs aren't here.
        max_restarts: as configured.
    """

    run_id: str
    begin_ns: int
    hosts: tuple[str, ...]
    world_size: int | None
    exit_code: int | None
    accounting: Accounting
    passed_over: int
    missing_ranks: tuple[int, ...] = ()
    max_restarts: int | None = None

    @property
    def cycles(self) -> Sequence[CycleSummary]:
        return self.accounting.cycles

    @property
    def restarts(self) -> int:
        """Number of restarts of the ranks."""
        return max(0, len(self.cycles) - 1)


def summarize_run(run: RunLogs) -> RunSummary:
    """Summarize one run."""
    records = run.records
    exit_codes = [each.record.exit_code for each in records if isinstance(each.record, RunEnded)]
    started = [each.record for each in records if isinstance(each.record, CycleStarted)]
    return RunSummary(
        run_id=run.run_id,
        begin_ns=run.begin_ns,
        hosts=tuple(sorted({log.host for log in run.files}, key=natural)),
        world_size=next((each.world_size for each in reversed(started) if each.world_size is not None), None),
        exit_code=max((code for code in exit_codes if code is not None), default=None),
        accounting=account(records, begin_ns=run.begin_ns),
        passed_over=sum(log.passed_over for log in run.files),
        missing_ranks=_missing_ranks(started),
        max_restarts=next((each.max_restarts for each in started), None),
    )


def _missing_ranks(started: Sequence[CycleStarted]) -> tuple[int, ...]:
    last = max((record.cycle for record in started), default=-1)
    of_last = [record for record in started if record.cycle == last]
    size = max((record.world_size or 0 for record in of_last), default=0)
    here = {rank.rank for record in of_last for rank in record.ranks}
    return tuple(rank for rank in range(size) if rank not in here) if here else ()
