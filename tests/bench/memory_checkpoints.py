"""What a memory checkpoint holds up the training thread for, beside a plain copy of the state, and its restore.

    make bench BENCH_ARGS="--only memory"
    python -m tests.bench.memory_checkpoints --device cuda

A rank saves its state again and again, is killed, and the next cycle restores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.cluster import SCRIPTS, end_on_sigterm, progress
from tests.bench.figures import shown, table
from tests.support.campaigns import run_job

STATES = {
    "large": "1 GiB in 128 tensors",
    "tiny": "20,000 tensors of 16 numbers",
    "numbers": "a list of 10^6 numbers",
}
_LIMIT_S = 300.0


def measure(reference: str | None, runs: int, device: str = "cpu") -> dict[str, Any]:
    """Return medians in seconds by kind of state. The first save, which makes the segment, doesn't count."""
    result: dict[str, Any] = {}
    for kind in STATES:
        with tempfile.TemporaryDirectory(prefix="ft-bench-") as directory:
            figures = Path(directory, "figures")
            words = [str(SCRIPTS / "memory_checkpoint.py"), kind, device, str(runs), str(figures)]
            code, output = run_job(
                ["--nproc-per-node=1", "--max-restarts=1", *words], Path(directory, "logs"), _LIMIT_S
            )
            found = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
        if code or not found or "restore_s" not in found[-1]:
            progress(f"memory, {STATES[kind]}: the training ended with {code}\n{output[-2000:]}")
            continue
        copies = found[1:-1]
        middle = {name: statistics.median(each[name] for each in copies) for name in ("save_s", "copy_s")}
        result[kind] = {**middle, **found[-1]}
    return result


def table_of(result: dict[str, Any]) -> str:
    rows = [
        [
            STATES[kind],
            *(shown(1e3 * found[name], " ms") for name in ("save_s", "copy_s")),
            shown(found["save_s"] / found["copy_s"]),
            shown(1e3 * found["restore_s"], " ms"),
        ]
        for kind, found in result.items()
    ]
    return table(["state", "save", "plain copy", "save / copy", "restore"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    end_on_sigterm()
    print(table_of(measure(None, given.runs, given.device)))


if __name__ == "__main__":
    main()
