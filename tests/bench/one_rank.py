"""One measurement in a process of its own, with this package or with the reference.

    python one_rank.py ours|reference    cost of a start/end pair, of a heartbeat, memory of the monitor

Not imported by anything: it must load nothing but what it measures.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

PAIRS = {"ours": 100_000, "reference": 5_000}
TIMEOUT_S = 600.0


def percentile(values: list[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def start(library: str, directory: str) -> tuple[Any, Any]:
    """A monitor and an initialised client of the library."""
    path = os.path.join(directory, "monitor.sock")
    os.environ.update({"FT_RANK_MONITOR_IPC_SOCKET": path, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    if library == "ours":
        from megatron_ft import FaultToleranceConfig, RankMonitorClient, RankMonitorServer

        monitor = RankMonitorServer.run_in_subprocess(
            FaultToleranceConfig(rank_section_timeouts={"step": TIMEOUT_S}), path
        )
    else:
        import torch.multiprocessing
        from nvidia_resiliency_ext.fault_tolerance import (
            FaultToleranceConfig,
            RankMonitorClient,
            RankMonitorServer,
        )

        config = FaultToleranceConfig(rank_section_timeouts={"step": TIMEOUT_S}, enable_nic_monitor=False)
        monitor = RankMonitorServer.run_in_subprocess(config, path, mp_ctx=torch.multiprocessing.get_context("spawn"))
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return monitor, client


def pss_mib(pid: int) -> float:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024


def time_calls(count: int, call: Any) -> dict[str, float]:
    times = []
    clock = time.perf_counter_ns
    for _ in range(count // 10):
        call()
    for _ in range(count):
        began = clock()
        call()
        times.append(clock() - began)
    return {"median_us": percentile(times, 0.5) / 1e3, "p99_us": percentile(times, 0.99) / 1e3}


def hooks(library: str, directory: str) -> dict[str, Any]:
    monitor, client = start(library, directory)

    def pair() -> None:
        client.start_section("step")
        client.end_section("step")

    count = PAIRS[library]
    result = {
        "pair": time_calls(count, pair),
        "heartbeat": time_calls(count, client.send_heartbeat),
        "monitor_pss_mib": pss_mib(monitor.pid),
    }
    client.shutdown_workload_monitoring()
    monitor.terminate()
    monitor.join(10)
    return result


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as directory:
        print(json.dumps(hooks(sys.argv[1], directory)))


if __name__ == "__main__":
    main()
