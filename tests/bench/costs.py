"""What watching costs: a hook, and the memory of a monitor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.figures import Row, compare, middle
from tests.bench.jobs import Enclosure, interleaved

ONE_RANK = Path(__file__).resolve().parent / "one_rank.py"


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
