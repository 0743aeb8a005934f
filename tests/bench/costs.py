"""What watching costs: a hook, the memory of a monitor, how soon a script starts."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.bench.figures import Row, compare, middle
from tests.bench.jobs import LAUNCHERS, Enclosure, interleaved

ONE_RANK = Path(__file__).resolve().parent / "one_rank.py"
FIRST_LINE = "import time, os; open(os.environ['FT_BENCH_STAMP'], 'a').write(f'{time.monotonic()}\\n')\n"


def measure_hooks(libraries: list[str], reference: str, runs: int) -> dict[str, Any]:
    """By library."""
    results: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
    for _, library in interleaved(runs, libraries):
        with Enclosure(library, reference) as enclosure:
            done = subprocess.run(
                [sys.executable, str(ONE_RANK), library],
                env=enclosure.env,
                capture_output=True,
                text=True,
                check=True,
            )
        results[library].append(json.loads(done.stdout.splitlines()[-1]))
    return {library: middle(found) for library, found in results.items()}


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


def launch_rows(launch: dict[str, float]) -> list[Row]:
    """For the table."""
    return [compare("launch to the script's first line, 2 ranks", "s", launch)]
