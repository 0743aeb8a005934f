"""Event logs of a large job: what they take on disk for each rank and day, and what a report takes for them.

The job never ran: eight ranks' events are made up from a seed, summed up as monitors do, gathered as launchers do, and
written again under other numbers for all other nodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_ft.core.facts.monitor import Minute
from megatron_ft.ipc.files.event_log import NullEventLog
from megatron_ft.launcher.monitors.node_minutes import NodeMinutes
from tests.bench.figures import Row
from tests.support.generated_logs import Fault, GeneratedJob, records_of_node, write_node

__all__ = ["measure", "rows"]

_PER_NODE = 8
_DAY_S = 86_400.0


def measure(ranks: int, steps: int) -> dict[str, float]:
    """Write the logs of such a job, with a hang half way, and read them as a user does."""
    with tempfile.TemporaryDirectory() as directory:
        bulk_bytes, length_s, files = _write(Path(directory), ranks, steps)
        begin = time.monotonic()
        command = [sys.executable, "-m", "megatron_ft", "report", directory]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            text = process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        took_s = time.monotonic() - begin
        assert process.returncode == 0, text
        assert f"{ranks} ranks, 1 restart" in text, text
        return {
            "mb_per_rank_and_day": bulk_bytes / 1e6 / ranks / length_s * _DAY_S,
            "files_per_node": files * _PER_NODE / ranks,
            "report_s": took_s,
            "report_cpu_s": used.ru_utime + used.ru_stime,
            "report_mb": used.ru_maxrss / 1024,
        }


def rows(found: dict[str, float]) -> list[Row]:
    """Lines of the table."""
    return [
        Row("event log of a rank and day, 0.5 s a step", "MB", found["mb_per_rank_and_day"]),
        Row("event log files of a node and life", "", found["files_per_node"]),
        Row("report on 1,000 ranks x 10,000 steps", "s", found["report_s"]),
        Row("report on 1,000 ranks x 10,000 steps, processor", "s", found["report_cpu_s"]),
        Row("report on 1,000 ranks x 10,000 steps, memory", "MB", found["report_mb"]),
    ]


def _write(directory: Path, ranks: int, steps: int) -> tuple[int, float, int]:
    """Return the bytes of all minutes, the seconds of the run, and the number of files."""
    fault = Fault(cycle=0, rank=_PER_NODE // 2, iteration=steps // 2)
    job = GeneratedJob(ranks=_PER_NODE, steps=steps, checkpoint_every=steps // 20, faults=(fault,))
    records, length_s = records_of_node(job)
    node = _gathered(records)
    bulk_bytes = 0
    for first in range(0, ranks, _PER_NODE):
        mine = [_moved(record, first, ranks) for record in node if first == 0 or record["ev"] not in _ONCE]
        write_node(directory, f"node-{first // _PER_NODE}", mine)
        bulk_bytes += sum(len(json.dumps(r, separators=(",", ":"))) + 1 for r in mine if r["ev"] == "minute")
    return bulk_bytes, length_s, sum(1 for path in directory.iterdir() if path.suffix == ".jsonl")


_ONCE = ("verdict", "evidence", "finding")
"""Records of one node only."""


class _Lines(NullEventLog):
    """Keeps what would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.minutes: list[Minute] = []

    def write(self, record: Any, *, t: int | None = None) -> None:
        self.minutes.append(record)


def _gathered(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with the minutes of all ranks in one, as a launcher writes them."""
    lines, found = _Lines(), []
    minutes = NodeMinutes(lines, _PER_NODE)
    for record in records:
        if record["ev"] != "minute":
            found.append(record)
            continue
        fields = {name: record[name] for name in ("cycle", "at_ns")}
        minutes.add(Minute(names=tuple(record["names"]), ranks=tuple(record["ranks"]), **fields), record["t"])
        minutes.write_due(record["t"])
        found += [{"t": record["t"], "ev": "minute", **_fields(each)} for each in lines.minutes]
        lines.minutes.clear()
    minutes.write_all()
    return found + [{"t": found[-1]["t"], "ev": "minute", **_fields(each)} for each in lines.minutes]


def _fields(minute: Minute) -> dict[str, Any]:
    return {"cycle": minute.cycle, "at_ns": minute.at_ns, "names": minute.names, "ranks": list(minute.ranks)}


def _moved(record: dict[str, Any], first: int, world_size: int) -> dict[str, Any]:
    """Return the record with the ranks of another node."""
    changed = dict(record)
    if "rank" in changed:
        changed["rank"] += first
    if record["ev"] == "minute":
        changed["ranks"] = [[row[0] + first, *row[1:]] for row in record["ranks"]]
    if record["ev"] == "cycle_started":
        changed["ranks"] = [{**each, "rank": each["rank"] + first} for each in record["ranks"]]
        changed["world_size"] = world_size
    return changed
