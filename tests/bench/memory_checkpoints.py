"""What memory checkpoints cost the training thread and save at a restart, beside files and local checkpoints.

    make bench BENCH_ARGS="--only memory"
    python tests/bench/memory_checkpoints.py --device cuda        # ours alone

The same training each time: its state is kept every few steps, its rank is killed once, and the next cycle restores.
torchrun's has a file on the disk, that of nvidia-resiliency-ext files in /dev/shm.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])
from tests.bench.figures import Row, compare, median
from tests.bench.jobs import SCRIPTS, Job, end_on_sigterm, progress

__all__ = ["measure", "rows"]

_LIMIT_S = 600.0
_KEPT = {"ours": "memory", "torchrun": "file", "reference": "reference"}
_OPTIONS = {"reference": ("--ft-initial-rank-heartbeat-timeout", "600")}


@dataclass(frozen=True)
class Training:
    """``owned_mib``: of parameters and optimizer state, which `save` leaves to the next optimizer step."""

    owned_mib: int = 896
    others_mib: int = 128
    step_s: float = 1.0
    every: int = 10
    last: int = 45
    device: str = "cpu"

    @property
    def gigabytes(self) -> float:
        return (self.owned_mib + self.others_mib) * (1 << 20) / 1e9


def measure(launchers: Sequence[str], reference: str) -> dict[str, Any]:
    """Each launcher's training with its way to keep the state, and that with a file every 100 steps."""
    result = {launcher: _run(launcher, reference, Training()) for launcher in launchers}
    return {**result, "rarely": _run("torchrun", reference, Training(every=100))}


def rows(found: dict[str, Any]) -> list[Row]:
    """Lines of the table."""
    ours, rarely = found["ours"], found["rarely"]

    def each(name: str) -> dict[str, float | None]:
        return {launcher: figures[name] for launcher, figures in found.items() if launcher != "rarely"}

    size, often = f"{ours['gigabytes']:.2f} GB", "state kept every 10 steps of 1 s"
    return [
        compare(f"{often}: training thread, a save of {size}", "s", each("save_s")),
        compare(f"{often}: share of the training time", "%", each("share")),
        compare(f"{often}: restore of {size}", "s", each("restore_s")),
        compare(f"{often}: iterations redone after a kill", "", each("redone"), is_compared=False),
        Row("file every 100 steps: iterations redone after the same kill", "", None, {"torchrun": rarely["redone"]}),
        Row("memory checkpoint: save / plain copy of what it copies", "", ours["ratio"]),
        Row("memory checkpoint: wait of the next optimizer step", "ms", ours["wait_ms"]),
    ]


def _run(launcher: str, reference: str, training: Training) -> dict[str, Any]:
    words = [training.owned_mib, training.others_mib, training.step_s, training.every, training.device, training.last]
    command = [str(SCRIPTS / "memory_checkpoint.py"), *map(str, words), _KEPT[launcher], "{directory}/figures"]
    options = _OPTIONS.get(launcher, ())
    shm = Path("/dev/shm") / f"ft-bench-{os.urandom(4).hex()}"
    variables = {"FT_BENCH_SHM": str(shm)}
    try:
        with Job(launcher, command, reference=reference, ranks=1, options=options, variables=variables) as job:
            job.wait_for(lambda _: None, _LIMIT_S)
            path = job.directory / "figures"
            found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            if not any("redone" in figures for figures in found):
                progress(f"memory, {launcher}: the training failed\n{job.tail()}")
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    return _summary(found, training)


def _summary(found: list[dict[str, Any]], training: Training) -> dict[str, Any]:
    def middle(name: str) -> float | None:
        # the first snapshot finds no optimizer state reserved, and its buffer has no pages yet
        return median(each[name] for each in found if name in each and each.get("number", 9) > 1)

    save_s, copy_s, next_s, step_s = (middle(name) for name in ("save_s", "copy_s", "next_step_s", "step_s"))
    wait_s = None if next_s is None or step_s is None else max(0.0, next_s - step_s)
    interval_s = training.every * training.step_s
    return {
        "gigabytes": training.gigabytes,
        "save_s": save_s,
        "wait_ms": None if wait_s is None else 1e3 * wait_s,
        "share": None if save_s is None or wait_s is None else 100 * (save_s + wait_s) / interval_s,
        "ratio": None if save_s is None or copy_s is None else save_s / copy_s,
        "restore_s": middle("restore_s"),
        "redone": middle("redone"),
    }


def main() -> None:
    """Run ours alone and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--owned", type=int, default=896, help="MiB of parameters and optimizer state")
    parser.add_argument("--others", type=int, default=128, help="MiB of other tensors, copied within save")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of a step")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    end_on_sigterm()
    training = Training(given.owned, given.others, given.step, given.every, 4 * given.every + 5, given.device)
    print(json.dumps(_run("ours", "", training), indent=2))


if __name__ == "__main__":
    main()
