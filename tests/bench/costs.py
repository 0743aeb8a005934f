"""What watching costs: a hook, the memory of a monitor, how late a hang is ended, how soon a script starts."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.figures import Row, compare, middle, percentile
from tests.bench.jobs import LAUNCHERS, Enclosure, interleaved

ONE_RANK = Path(__file__).resolve().parent / "one_rank.py"
FIRST_LINE = "import time, os; open(os.environ['FT_BENCH_STAMP'], 'a').write(f'{time.monotonic()}\\n')\n"
TIMEOUT_S = 1.0


def measure_hooks(libraries: list[str], reference: str, runs: int) -> dict[str, Any]:
    """By library."""
    results: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
    for _, library in interleaved(runs, libraries):
        with Enclosure(library, reference) as enclosure:
            done = subprocess.run(
                [sys.executable, str(ONE_RANK), library, "hooks"],
                env=enclosure.env,
                capture_output=True,
                text=True,
                check=True,
            )
        results[library].append(json.loads(done.stdout.splitlines()[-1]))
    return {library: middle(found) for library, found in results.items()}


def burn(stop: Any) -> None:
    """Until it is told to stop, or its parent is no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for its parent, which ends it
    parent = os.getppid()
    while not stop.is_set() and os.getppid() == parent:
        sum(range(10_000))


@contextlib.contextmanager
def loaded_machine() -> Iterator[None]:
    """One busy process per core."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    burners = [context.Process(target=burn, args=(stop,), daemon=True) for _ in range(os.cpu_count() or 1)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        stop.set()
        for burner in burners:
            burner.join()


def measure_lateness(library: str, reference: str, count: int, at_once: int) -> list[float]:
    """Seconds from the deadline to the death of a hung rank; never negative if no rank is ended too early."""
    lateness: list[float] = []
    with Enclosure(library, reference) as enclosure:
        while len(lateness) < count:
            ranks = [
                subprocess.Popen(
                    [sys.executable, str(ONE_RANK), library, "hang", str(TIMEOUT_S)],
                    env=enclosure.env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                )
                for _ in range(min(at_once, count - len(lateness)))
            ]
            lateness += wait_for_ends(ranks)
    return lateness


def wait_for_ends(ranks: list[subprocess.Popen[str]]) -> list[float]:
    """Seconds after the deadline of each."""
    ended: dict[int, float] = {}
    poller = select.poll()
    pidfds = {os.pidfd_open(rank.pid): rank for rank in ranks}
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    while len(ended) < len(ranks):
        for pidfd, _ in poller.poll():
            ended[pidfd] = time.monotonic()
            poller.unregister(pidfd)
    lateness = []
    for pidfd, rank in pidfds.items():
        assert rank.stdout is not None
        began = json.loads(rank.stdout.readline())["began"]
        lateness.append(ended[pidfd] - began - TIMEOUT_S)
        rank.stdout.close()
        rank.wait()
        os.close(pidfd)
    return lateness


def measure_launch(launchers: list[str], reference: str, runs: int) -> dict[str, float]:
    """Seconds from the start of the launcher to the first line of the script, the later of two ranks."""
    times: dict[str, list[float]] = {name: [] for name in launchers}
    for _, name in interleaved(runs, launchers):
        with Enclosure(name, reference) as enclosure:
            script, stamps = enclosure.directory / "first_line.py", enclosure.directory / "stamps"
            script.write_text(FIRST_LINE)
            began = time.monotonic()
            subprocess.run(
                [sys.executable, *LAUNCHERS[name], "--nproc-per-node", "2", str(script)],
                env={**enclosure.env, "FT_BENCH_STAMP": str(stamps)},
                capture_output=True,
                check=True,
            )
            times[name].append(max(float(line) for line in stamps.read_text().split()) - began)
    return {name: statistics.median(found) for name, found in times.items()}


def hook_rows(hooks: dict[str, Any]) -> list[Row]:
    """For the table."""
    table = []
    for what, key, figure in (
        ("start/end pair of a section, median", "pair", "median_us"),
        ("start/end pair of a section, p99", "pair", "p99_us"),
        ("heartbeat, median", "heartbeat", "median_us"),
    ):
        table.append(compare(what, "us", {name: found[key][figure] for name, found in hooks.items()}))
    memory = {name: found["monitor_pss_mib"] for name, found in hooks.items()}
    return [*table, compare("monitor's memory (PSS)", "MiB", memory)]


def lateness_rows(late: dict[str, list[float]]) -> list[Row]:
    """For the table."""
    return [
        compare(
            f"hang ended after its deadline, {what}, machine loaded",
            "ms",
            {name: percentile(found, share) * 1e3 for name, found in late.items()},
        )
        for what, share in (("median", 0.5), ("p99", 0.99))
    ]


def launch_rows(launch: dict[str, float]) -> list[Row]:
    """For the table."""
    return [compare("launch to the script's first line, 2 ranks", "s", launch)]
