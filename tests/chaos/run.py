"""``make chaos``: the example's job meets drawn faults, again and again, and has to come through each time.

    python tests/chaos/run.py [--runs 500] [--seed 0] [--jobs 2]
    python tests/chaos/run.py --memory ...     with the state kept in memory, too
    python tests/chaos/run.py --hosts ...      three launchers on virtual hosts with etcd, which needs root
    python tests/chaos/run.py --only 17        one seed again, with all that was written kept

A campaign goes on where it was left: seeds whose result is in ``out/chaos/results.jsonl`` aren't run again, and one
that failed counts as long as its line is there. Of a run whose disk was filled the checkpoints aren't kept: their file
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
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)
from tests.chaos import hosts
from tests.chaos.check import Seen, problems
from tests.chaos.one import Run
from tests.chaos.plan import Plan, draw
from tests.support.background import heed_the_terminal
from tests.support.campaigns import read_records

Result = dict[str, Any]
_MANY = 10
"""Faults of one kind, of which at least one hits something. Others come too late, or find no process to hit."""


def main() -> int:
    """Run what is still to be run; 1 if anything of the campaign wasn't as it has to be, also before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="default: 500")
    parser.add_argument("--seed", type=int, default=0, help="the first one; default: 0")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default: 2")
    parser.add_argument("--memory", action="store_true", help="with memory checkpoints")
    parser.add_argument("--hosts", action="store_true", help="three launchers on virtual hosts, with etcd")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these seeds, done or not")
    args = parser.parse_args()
    heed_the_terminal()
    out = ROOT / f"out/chaos{'-memory' * args.memory}{'-hosts' * args.hosts}"
    out.mkdir(parents=True, exist_ok=True)
    log = out / "results.jsonl"
    log.touch()
    done = {result["seed"] for result in read_records(log)}
    seeds = args.only or [seed for seed in range(args.seed, args.seed + args.runs) if seed not in done]
    plans = [hosts.draw(seed) if args.hosts else draw(seed, memory=args.memory) for seed in seeds]
    if os.geteuid() != 0 and (left_out := [plan.seed for plan in plans if plan.needs_small_disk]):
        print(f"left out, because a small file system needs root: seeds {', '.join(map(str, left_out))}", flush=True)
        plans = [plan for plan in plans if not plan.needs_small_disk]
    library = clock_library(out)
    kind, check = (hosts.HostsRun, hosts.problems) if args.hosts else (Run, problems)
    hashes = {layout: undisturbed(kind, layout, library) for layout in sorted({plan.layout for plan in plans})}
    lock = threading.Lock()

    def one(plan: Plan) -> Result:
        result = run_plan(kind(plan, clock_library=library), hashes[plan.layout], check, keep=args.only is not None)
        with lock:
            print(line_of(result), flush=True)
            if args.only is None:
                with log.open("a") as file:
                    file.write(json.dumps(result) + "\n")
        return result

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(one, plans))
    if args.only is None:
        results = list(read_records(log))
    bad = [result for result in results if result["problems"]]
    cycles, seconds = (sum(result[name] for result in results) for name in ("cycles", "seconds"))
    planned, met = (Counter(kind for result in results for kind in result.get(name, ())) for name in ("planned", "met"))
    told = ", ".join(f"{met[kind]} of {count} {kind}" for kind, count in planned.most_common())
    print(
        f"{len(results)} runs, {cycles} cycles, {seconds:.0f} s of runs, {len(bad)} not as they have to be; hit: {told}"
    )
    never = [kind for kind, count in planned.items() if count >= _MANY and not met[kind]]
    if never:
        print(f"never hit anything: {', '.join(never)}")
    for result in bad:
        print(line_of(result))
        more = "--memory " * args.memory + "--hosts " * args.hosts
        print(f"    again: python tests/chaos/run.py {more}--only {result['seed']}")
    return 1 if bad or never else 0


def run_plan(run: Run, undisturbed_hash: str, check: Callable[[Seen], list[str]], *, keep: bool) -> Result:
    """One run, and what was wrong with it, whatever that is; its directory stays if anything was."""
    plan, began, cycles, hit = run.plan, time.monotonic(), 0, set[int]()
    try:
        with run:
            seen = run.perform(undisturbed_hash)
        wrong, cycles, hit = check(seen), len(list(seen.ended())), seen.hit()
    except Exception:  # noqa: BLE001 - one run doesn't end a campaign
        wrong = [f"the campaign itself raised: {traceback.format_exc()}"]
    if not keep and not wrong:
        run.remove()
    return {
        "seed": plan.seed,
        "cycles": cycles,
        "seconds": round(time.monotonic() - began, 1),
        "problems": wrong,
        "directory": str(run.directory) if keep or wrong else None,
        "planned": [event.fault for event in plan.events],
        "met": [plan.events[number].fault for number in hit],
        "says": plan.describe(),
    }


def undisturbed(kind: type[Run], layout: str, library: Path) -> str:
    """The hash of a layout's final weights without a fault."""
    with kind(Plan(seed=-1, layout=layout, preload="megatron", learns=False), clock_library=library) as run:
        seen = run.perform("")
    if seen.weights is None:
        raise SystemExit(f"the job doesn't run without a fault:\n{run.output()}")
    run.remove()
    return seen.weights


def clock_library(out: Path) -> Path:
    """Steps the wall clock of the processes that it is preloaded into."""
    path = out / "wall_clock.so"
    if not path.exists():
        source = Path(__file__).with_name("wall_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(path), str(source)], check=True)
    return path


def line_of(result: Result) -> str:
    head = f"{'FAILED' if result['problems'] else 'ok'} ({result['seconds']:.1f} s, {result['cycles']} cycles)"
    kept = [f"    kept in {result['directory']}"] if result["directory"] else []
    return "\n".join([f"{head} {result['says']}", *(f"    {problem}" for problem in result["problems"]), *kept])


if __name__ == "__main__":
    sys.exit(main())
