"""Event log of one rank, created with its first event."""

from __future__ import annotations

from megatron_ft.core.facts.all_kinds import Record
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.records.event_log import EventLog, NullEventLog


class RankLog:
    """Writes events of a rank while it is monitored; without a directory, none."""

    def __init__(self, info: RankInfo | None = None, directory: str | None = None, run_id: str = "") -> None:
        self._info, self._directory, self._run_id = info, directory, run_id
        self._log: EventLog = NullEventLog()

    def write(self, record: Record) -> None:
        info = self._info
        if info is not None and self._directory is not None and self._log.path == "":
            who = {"rank": info.global_rank, "local_rank": info.local_rank, "cycle": info.cycle}
            name = f"{info.global_rank}-cycle{info.cycle}"
            self._log = EventLog.open(self._directory, role="rank", run_id=self._run_id, name=name, **who)
        self._log.write(record)

    def flush(self) -> None:
        """Wait, some seconds at most, until everything is written."""
        self._log.flush()

    def close(self) -> None:
        self._log.close()
