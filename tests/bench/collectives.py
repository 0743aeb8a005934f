"""What the watch of a script's collectives costs these: all_reduce with and without it, in the same processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from tests.bench.figures import Row
from tests.bench.jobs import LAUNCHERS, SCRIPTS, Enclosure

__all__ = ["measure", "rows"]


def measure(runs: int) -> dict[str, Any]:
    """Microseconds of an all_reduce of 4 KiB between two ranks, by block; all runs together."""
    found: dict[str, list[float]] = {"watched": [], "unwatched": []}
    for _ in range(runs):
        with Enclosure("ours", "") as enclosure:
            path = enclosure.directory / "found.json"
            subprocess.run(
                [sys.executable, *LAUNCHERS["ours"], "--nproc-per-node", "2", str(SCRIPTS / "watched.py"), str(path)],
                env=enclosure.env,
                capture_output=True,
                check=True,
            )
            for name, took in json.loads(path.read_text()).items():
                found[name] += took
    return found


def rows(found: dict[str, Any]) -> list[Row]:
    """For the table: the medians, their difference, and what two halves of the same differ by, which is noise."""
    watched, unwatched = statistics.median(found["watched"]), statistics.median(found["unwatched"])
    halves = [statistics.median(found["unwatched"][part::2]) for part in (0, 1)]
    return [
        Row("all_reduce of 4 KiB under gloo, 2 ranks, collectives watched", "us", watched),
        Row("the same in the same processes, not watched", "us", unwatched),
        Row("difference", "%", 100 * (watched / unwatched - 1)),
        Row("difference of every other block that isn't watched, noise", "%", 100 * abs(halves[0] / halves[1] - 1)),
    ]
