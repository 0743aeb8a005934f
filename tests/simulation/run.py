"""Thousands of simulated jobs, each from a seed: `make simulate`.

    python tests/simulation/run.py --runs 100000            # seeds 0 to 99999, on all cores
    python tests/simulation/run.py --only 1234              # one of them again, with its story
    python tests/simulation/run.py --runs 1000 --nodes 1000 # large ones

Of a seed that breaks a property, faults are left out as long as it still does. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.simulation.plan import Plan, plan_of
from tests.simulation.simulate import simulate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--nodes", type=int, default=None, help="as many in each run; default: 2 to 50, rarely 500")
    parser.add_argument("--drop", type=int, nargs="*", default=(), help="leave out these faults (by number)")
    parser.add_argument("--only", type=int, default=None, help="one seed, with all that happens")
    parser.add_argument("--first", action="store_true", help="end with the first one that breaks a property")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    if options.only is not None:
        run = simulate(_without(plan_of(options.only, nodes=options.nodes), options.drop), tell=True)
        print("\n".join([*run.story, str(replace(run.plan, faults=())), *run.broken]))
        return 1 if run.broken else 0
    began_s = time.monotonic()
    seeds = range(options.seed, options.seed + options.runs)
    kinds: Counter[str] = Counter()
    runs = decisions = broken = 0
    # the cyclic garbage of a run is small, and looking for it costs a fifth of the time
    with multiprocessing.Pool(options.jobs, gc.set_threshold, (200_000, 20, 20)) as pool:
        for seed, lines, faults, made in pool.imap_unordered(partial(_run, options.nodes), seeds, chunksize=8):
            kinds.update(faults)
            runs, decisions = runs + 1, decisions + made
            if lines:
                broken += 1
                print(f"seed {seed}: {lines[0]}", flush=True)
                if broken <= 5 and not options.first:
                    nodes = "" if options.nodes is None else f" --nodes {options.nodes}"
                    drop = " ".join(map(str, shrunk(plan_of(seed, nodes=options.nodes))))
                    print(f"    python tests/simulation/run.py --only {seed}{nodes} --drop {drop}", flush=True)
            if broken and options.first:
                break
    seconds = time.monotonic() - began_s
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{runs} runs, {decisions} decisions in {seconds:.0f} s; faults: {told}")
    print(f"{broken} broke a property" if broken else "all properties held")
    return 1 if broken else 0


def _run(nodes: int | None, seed: int) -> tuple[int, list[str], list[str], int]:
    run = simulate(plan_of(seed, nodes=nodes))
    return seed, run.broken, [hurt.fault.kind for hurt in run.job.struck], len(run.job.made)


def _without(plan: Plan, drop: Sequence[int]) -> Plan:
    return replace(plan, faults=tuple(fault for number, fault in enumerate(plan.faults) if number not in drop))


def shrunk(plan: Plan) -> list[int]:
    """Return numbers of faults that needn't happen for the plan to break a property."""
    drop: list[int] = []
    for number in range(len(plan.faults)):
        if simulate(_without(plan, [*drop, number])).broken:
            drop.append(number)
    return drop


if __name__ == "__main__":
    sys.exit(main())
