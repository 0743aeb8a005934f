"""Microseconds of a section's start/end pair and of a heartbeat, as JSON: ``python hooks.py ours|reference``.

It loads nothing but the library that is measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 600.0


def start(library: str, directory: str) -> tuple[Any, Any]:
    """Start a monitor and initialise a client of the library."""
    path = os.path.join(directory, "monitor.sock")
    os.environ.update({"FT_RANK_MONITOR_IPC_SOCKET": path, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    served: Any
    if library == "ours":
        import megatron_ft as served

        options: dict[str, Any] = {}
    else:
        import nvidia_resiliency_ext.fault_tolerance as served
        import torch.multiprocessing

        options = {"mp_ctx": torch.multiprocessing.get_context("spawn")}
    config = served.FaultToleranceConfig(rank_section_timeouts={"step": TIMEOUT_S})
    if library != "ours":
        config.enable_nic_monitor = False
    monitor = served.RankMonitorServer.run_in_subprocess(config, path, **options)
    client = served.RankMonitorClient()
    client.init_workload_monitoring()
    return monitor, client


def timed(count: int, call: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the 99th percentile of that many calls, after a tenth of them that aren't counted."""
    times = []
    clock = time.perf_counter_ns
    for _ in range(count + count // 10):
        began = clock()
        call()
        times.append(clock() - began)
    times = sorted(times[count // 10 :])
    return times[count // 2] / 1e3, times[count * 99 // 100] / 1e3


def main(library: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as directory:
        monitor, client = start(library, directory)

        def pair() -> None:
            client.start_section("step")
            client.end_section("step")

        figures = {}
        for what, call in (("start/end pair of a section", pair), ("heartbeat", client.send_heartbeat)):
            median, p99 = timed(100_000 if library == "ours" else 5_000, call)
            figures.update({f"{what}, median": median, f"{what}, p99": p99})
        client.shutdown_workload_monitoring()
        monitor.terminate()
        monitor.join(10)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
