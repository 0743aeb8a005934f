"""``make chaos``: the example's job meets drawn faults, again and again, and has to come through each time.

    python tests/chaos/run.py [--runs 500] [--seed 0] [--minutes 60] [--out out/chaos] [--jobs 2]
    python tests/chaos/run.py --memory ...     with the state kept in memory, too
    python tests/chaos/run.py --only 17        one seed again, with all that was written kept

A campaign goes on where it was left: seeds whose result is in ``<out>/results.jsonl`` aren't run again, and one that
failed counts as long as its line is there. Of a run whose disk was filled the checkpoints aren't kept: their file
system, of a size of its own, is in memory and goes with the run.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
from tests.chaos.check import Seen, problems
from tests.chaos.one import Run
from tests.chaos.plan import Plan, draw
from tests.support.background import heed_the_terminal

Result = dict[str, Any]


def main() -> int:
    """Run what is still to be run; 1 if anything of the campaign wasn't as it has to be, also before."""
    heed_the_terminal()
    args = _parse_args()
    out = Path(args.out or f"out/chaos{'-memory' * args.memory}")
    out.mkdir(parents=True, exist_ok=True)
    library = clock_library(out)
    if args.only is not None:
        seeds: Sequence[int] = args.only
    else:
        done = {result["seed"] for result in read_results(out)}
        seeds = [seed for seed in range(args.seed, args.seed + args.runs) if seed not in done]
    plan_of = partial(draw, memory=args.memory)
    seeds = possible(seeds, plan_of)
    hashes = undisturbed(out, sorted({plan_of(seed).layout for seed in seeds}), library)
    end = time.monotonic() + 60.0 * args.minutes
    lock = threading.Lock()

    def one(seed: int) -> bool:
        if time.monotonic() > end:
            return True
        result = run_seed(plan_of(seed), hashes, library, keep=args.only is not None)
        with lock:
            print(_line(result), flush=True)
            if args.only is None:
                with (out / "results.jsonl").open("a") as file:
                    file.write(json.dumps(result) + "\n")
        return not result["problems"]

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        good = list(pool.map(one, seeds))
    if args.only is not None:
        return 0 if all(good) else 1
    results = read_results(out)
    print(summary(results))
    return 1 if any(result["problems"] for result in results) else 0


def possible(seeds: Sequence[int], plan_of: Callable[[int], Plan]) -> Sequence[int]:
    """Those that this user may run: without root no file system can be mounted. Says which ones are left out."""
    left_out = [seed for seed in seeds if plan_of(seed).needs_small_disk] if os.geteuid() != 0 else []
    if left_out:
        print(f"left out, because a small file system needs root: seeds {', '.join(map(str, left_out))}", flush=True)
    return [seed for seed in seeds if seed not in left_out]


def run_seed(plan: Plan, hashes: dict[str, str], library: Path | None, *, keep: bool) -> Result:
    """One run, and what was wrong with it, whatever that is; its directory stays if anything was."""
    began, wrong = time.monotonic(), list[str]()
    run: Run | None = None
    seen: Seen | None = None
    try:
        run = Run(plan, clock_library=library)
        with run:
            seen = run.perform(hashes[plan.layout])
            wrong += problems(seen)
        if not keep and not wrong:
            run.remove()
    except Exception as error:  # noqa: BLE001 - one run doesn't end a campaign
        wrong.append(_raised(error))
    return {
        "seed": plan.seed,
        "layout": plan.layout,
        "memory": plan.memory,
        "cycles": len(list(seen.ended())) if seen is not None else 0,
        "seconds": round(time.monotonic() - began, 1),
        "problems": wrong,
        "directory": str(run.directory) if run is not None and run.directory.exists() else None,
        "says": plan.describe(),
    }


def _raised(error: Exception) -> str:
    """The last line of its traceback, and where that was."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = traceback.format_exception_only(error)[-1].strip()
    return f"the campaign itself raised, in line {where.lineno} of {where.filename}: {said}"


def undisturbed(out: Path, layouts: Iterable[str], library: Path | None) -> dict[str, str]:
    """The hash of each layout's final weights without a fault; kept in a file."""
    path = out / "undisturbed.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    for layout in layouts:
        if layout not in known:
            plan = Plan(seed=-1, layout=layout, preload="megatron", learns=False)
            with Run(plan, clock_library=library) as run:
                seen = run.perform("")
            if seen.weights is None:
                raise SystemExit(f"the job doesn't run without a fault:\n{run.output()}")
            run.remove()
            known[layout] = seen.weights
    path.write_text(json.dumps(known))
    return known


def clock_library(out: Path) -> Path:
    """Steps the wall clock of the processes that it is preloaded into."""
    path = out / "wall_clock.so"
    source = Path(__file__).with_name("wall_clock.c")
    if not path.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(path), str(source)], check=True)
    return path.resolve()


def read_results(out: Path) -> list[Result]:
    """Those of the campaign so far."""
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(results: Sequence[Result]) -> str:
    """Figures in a line, and the seeds that failed with the command that repeats each."""
    bad = [result for result in results if result["problems"]]
    cycles, seconds = sum(r["cycles"] for r in results), sum(r["seconds"] for r in results)
    lines = [f"{len(results)} runs, {cycles} cycles, {seconds:.0f} s of runs, {len(bad)} not as they have to be"]
    for result in bad:
        options = "--memory " * result.get("memory", False)
        lines += [_line(result), f"    again: python tests/chaos/run.py {options}--only {result['seed']}"]
    return "\n".join(lines)


def _line(result: Result) -> str:
    head = f"{'FAILED' if result['problems'] else 'ok'} ({result['seconds']:.1f} s, {result['cycles']} cycles)"
    kept = [f"    kept in {result['directory']}"] if result["directory"] else []
    return "\n".join([f"{head} {result['says']}", *(f"    {problem}" for problem in result["problems"]), *kept])


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A chaos campaign on this machine.", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=500, help="default: 500")
    parser.add_argument("--seed", type=int, default=0, help="the first one; default: 0")
    parser.add_argument("--minutes", type=float, default=120.0, help="no run begins later than that; default: 120")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default: 2")
    parser.add_argument("--out", help="default: out/chaos")
    parser.add_argument("--memory", action="store_true", help="with memory checkpoints")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these seeds, done or not")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
