"""Cost of a hook: a start/end pair of a section, and a heartbeat, in the training thread."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from megatron_ft import RankMonitorClient
from tests.bench.figures import shown, table
from tests.support.monitored import monitor

_CALLS = 100_000


def measure(_reference: str | None, runs: int) -> dict[str, Any]:
    """Return microseconds: medians over the runs, by hook, of the median and of the 99th percentile."""
    found = [_run() for _ in range(runs)]
    return {
        name: [statistics.median(each) for each in zip(*(run[name] for run in found), strict=True)] for name in found[0]
    }


def table_of(result: dict[str, Any]) -> str:
    rows = [[name, *(shown(each, " us") for each in figures)] for name, figures in result.items()]
    return table(["", "median", "99 % take at most"], rows)


def _run() -> dict[str, tuple[float, float]]:
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as directory:
        path = f"{directory}/monitor.sock"
        rank = {"FT_RANK_MONITOR_IPC_SOCKET": path, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        with mock.patch.dict(os.environ, rank), monitor(path, rank_section_timeouts={"step": 600.0}):
            client = RankMonitorClient()
            client.init_workload_monitoring()

            def pair() -> None:
                client.start_section("step")
                client.end_section("step")

            hooks = {"start/end pair of a section": pair, "heartbeat": client.send_heartbeat}
            figures = {name: _timed(hook) for name, hook in hooks.items()}
            client.shutdown_workload_monitoring()
    return figures


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the 99th percentile of many calls, after a tenth of them that isn't counted."""
    times = []
    clock = time.perf_counter_ns
    for _ in range(_CALLS + _CALLS // 10):
        began = clock()
        call()
        times.append(clock() - began)
    times = sorted(times[_CALLS // 10 :])
    return times[_CALLS // 2] / 1e3, times[_CALLS * 99 // 100] / 1e3
