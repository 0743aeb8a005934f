"""The minutes of a node's ranks become one line, which waits for none of them for long."""

from __future__ import annotations

from typing import Any

from megatron_ft.core.facts.minutes import RankMinute
from megatron_ft.core.facts.monitor import Minute
from megatron_ft.launcher.monitors.node_interval_rows import NodeMinutes
from megatron_ft.records.event_log import NullEventLog

S = 1_000_000_000


class Log(NullEventLog):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[int]] = []

    def write(self, record: Any, *, t: int | None = None) -> None:
        self.lines.append([row.rank for row in record.ranks])


def minute(rank: int, *, at_s: int = 60) -> Minute:
    return Minute(cycle=0, at_ns=at_s * S, ranks=(RankMinute(rank, 0.0, 60.0),))


def test_minutes_of_all_ranks_are_one_line() -> None:
    log = Log()
    minutes = NodeMinutes(log, 3)
    for rank in (0, 2, 1):
        assert log.lines == []
        minutes.add(minute(rank), 0)
    minutes.write_all()
    assert log.lines == [[0, 2, 1]]
