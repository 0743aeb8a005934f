"""``make bench``: what this package costs and what it saves, beside torchrun and nvidia-resiliency-ext.

Prints one table and writes the same figures, and those of each run, as JSON. Ratios say how many times better ours
is. Runs of the peers are interleaved, so that a slow minute of the machine hits all of them. It takes about fifteen
minutes, most of it waiting; ``--only`` picks parts of it, ``--quick`` makes few runs.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# this file is run as a script; its own directory must not hide modules of the same names
sys.path[0] = str(Path(__file__).resolve().parents[2])
from tests.bench import control, costs, goodput, memory_checkpoints, restarts, rules
from tests.bench.figures import Row, print_table
from tests.bench.jobs import end_on_sigterm, progress


@dataclass(frozen=True)
class Settings:
    """What the parts need."""

    libraries: list[str]
    """With hooks to compare."""
    launchers: list[str]
    reference: str
    runs: int


@dataclass(frozen=True)
class Part:
    """A name for the command line, and how it is measured and shown."""

    what: str
    measure: Callable[[Settings], Any]
    rows: Callable[[Any], list[Row]]


PARTS = {
    "hooks": Part(
        "cost of a hook, memory of a monitor",
        lambda s: costs.measure_hooks(s.libraries, s.reference, s.runs),
        costs.hook_rows,
    ),
    "restarts": Part(
        "launch and restart to the first step, memory of ranks",
        lambda s: restarts.measure(s.launchers, s.reference, s.runs),
        restarts.rows,
    ),
    "goodput": Part(
        "goodput of a training with faults", lambda s: goodput.measure(s.launchers, s.reference), goodput.rows
    ),
    "memory": Part(
        "state kept in memory, beside files and local checkpoints",
        lambda s: memory_checkpoints.measure(s.launchers, s.reference),
        memory_checkpoints.rows,
    ),
    "control": Part(
        "nodes that meet, lose one, and meet again, without ranks, on loopback",
        lambda s: control.measure_all([100, 250, 1000, 10_000]),
        control.rows,
    ),
    "rules": Part(
        "rules for learned timeouts, on made-up jobs",
        lambda s: rules.measure(min(s.runs, 4), 1_000_000 if s.runs > 2 else 100_000),
        rules.rows,
    ),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="parts:\n" + "\n".join(f"  {name:10} {part.what}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=part_names, default=list(PARTS), metavar="PARTS", help="for example hooks,goodput"
    )
    parser.add_argument("--runs", type=int, default=7, help="of everything that is a median over runs")
    parser.add_argument("--quick", action="store_true", help="two runs")
    parser.add_argument("--reference", default=".venv/nvrx", help="folder with nvidia-resiliency-ext 0.4.1")
    parser.add_argument("--json", default="out/bench.json", help="where the figures go")
    args = parser.parse_args()
    if args.quick:
        args.runs = min(args.runs, 2)
    if args.runs < 1:
        parser.error("--runs must be at least 1")
    return args


def part_names(text: str) -> list[str]:
    """For argparse; in the order in which they are measured."""
    asked = text.split(",")
    unknown = [name for name in asked if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked]


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    end_on_sigterm()
    reference = os.path.abspath(args.reference)
    has_reference = os.path.isdir(os.path.join(reference, "nvidia_resiliency_ext"))
    if not has_reference:
        progress(f"no reference in {args.reference}; measuring without it")
    others = ["reference"] if has_reference else []
    settings = Settings(
        libraries=["ours", *others],
        launchers=["ours", "torchrun", *others],
        reference=reference,
        runs=args.runs,
    )
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "runs": args.runs, "load": {}}
    for name in args.only:
        progress(f"{name}: {PARTS[name].what}")
        began = time.monotonic()
        before = os.getloadavg()[0]
        result[name] = PARTS[name].measure(settings)
        result["load"][name] = [before, os.getloadavg()[0]]
        progress(f"{name}: done in {time.monotonic() - began:.0f} s")
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    print_table(f"{result['machine']}, {args.runs} runs", [row for n in args.only for row in PARTS[n].rows(result[n])])
    print(f"written to {args.json}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
