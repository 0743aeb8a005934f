"""Cost of a hook: a start/end pair of a section, and a heartbeat, in the training thread."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from tests.bench.cluster import SCRIPTS, Enclosure
from tests.bench.figures import shown, table


def measure(reference: str | None, runs: int) -> dict[str, Any]:
    """Return microseconds by library and figure."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], **({"reference": []} if reference else {})}
    for library in [*found] * runs:  # interleaved: a slow minute of the machine hits both
        with Enclosure(library, reference) as enclosure:
            command = [sys.executable, str(SCRIPTS / "hooks.py"), library]
            done = subprocess.run(command, env=enclosure.env, stdout=subprocess.PIPE, text=True, check=True)
        found[library].append(json.loads(done.stdout.splitlines()[-1]))
    return {name: {what: statistics.median(run[what] for run in of) for what in of[0]} for name, of in found.items()}


def table_of(result: dict[str, Any]) -> str:
    ours, theirs = result["ours"], result.get("reference", {})
    rows = [[what, shown(ours[what], " us"), shown(theirs.get(what), " us")] for what in ours]
    return table(["", "megatron_ft", "nvidia-resiliency-ext 0.4.1"], rows)
