"""``make bench``: what this package costs and what it saves, beside torchrun and nvidia-resiliency-ext.

Prints a table for each part, and writes the figures, and those of each run, as JSON. It takes about twenty minutes,
most of it waiting; ``--only`` picks parts of it, ``--quick`` makes two runs.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

# this file is run as a script; its own directory must not hide modules of the same names
sys.path[0] = str(Path(__file__).resolve().parents[2])
from tests.bench import goodput, hooks, memory_checkpoints, restarts, rules
from tests.bench.cluster import end_on_sigterm, progress

PARTS: dict[str, Any] = {
    "hooks": hooks,
    "restarts": restarts,
    "goodput": goodput,
    "memory": memory_checkpoints,
    "rules": rules,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="parts:\n" + "\n".join(f"  {name:8} {part.__doc__.splitlines()[0]}" for name, part in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="for example hooks,goodput")
    parser.add_argument("--runs", type=int, default=7, help="of everything that is a median over runs")
    parser.add_argument("--quick", action="store_const", dest="runs", const=2, help="two runs")
    parser.add_argument("--reference", default=".venv/nvrx", help="folder with nvidia-resiliency-ext 0.4.1")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - PARTS.keys():
        parser.error(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    end_on_sigterm()
    reference: str | None = os.path.abspath(args.reference)
    if not os.path.isdir(f"{reference}/nvidia_resiliency_ext"):
        progress(f"no reference in {args.reference}; measuring without it")
        reference = None
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "runs": args.runs, "load": {}}
    for name in chosen:
        began_s, before = time.monotonic(), os.getloadavg()[0]
        result[name] = PARTS[name].measure(reference, args.runs)
        result["load"][name] = [before, os.getloadavg()[0]]
        progress(f"{name}: done in {time.monotonic() - began_s:.0f} s")
        print(f"\n{PARTS[name].table_of(result[name])}\n", flush=True)
    path = Path("out/bench.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['machine']}, {args.runs} runs; written to {path}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
