"""Thousands of simulated jobs, each from a seed: `make simulate`.

    python tests/simulation/run.py --runs 100000            # seeds 0 to 99999, on all cores
    python tests/simulation/run.py --only 1234              # one of them again, with its story
    python tests/simulation/run.py --runs 1000 --nodes 1000 # large ones

A seed that breaks a property is shrunk: fewer faults, fewer nodes. The exit code is 1 if there was one.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.simulation.plan import Plan, plan_of
from tests.simulation.simulate import simulate

__all__ = ["main", "shrunk"]

_BATCH = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--nodes", type=int, default=None, help="as many in each run; default: 2 to 50")
    parser.add_argument("--faults", type=int, default=None, help="as many in each run; default: 0 to 6")
    parser.add_argument("--drop", type=int, nargs="*", default=(), help="leave out these faults (by number)")
    parser.add_argument("--only", type=int, default=None, help="one seed, with all that happens")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    if options.only is not None:
        return _tell(_plan(options.only, options.nodes, options.faults, options.drop))
    began_s = time.monotonic()
    seeds = range(options.seed, options.seed + options.runs)
    batches = [(seeds[i : i + _BATCH], options.nodes, options.faults) for i in range(0, len(seeds), _BATCH)]
    kinds: Counter[str] = Counter()
    decisions = broken = 0
    # the cyclic garbage of a run is small, and looking for it costs a fifth of the time
    with multiprocessing.Pool(options.jobs, gc.set_threshold, (200_000, 20, 20)) as pool:
        for bad, faults, made in pool.imap_unordered(_batch, batches):
            kinds.update(faults)
            decisions += made
            for seed, lines in bad:
                broken += 1
                print(f"seed {seed}: {lines[0]}", flush=True)
                if broken <= 5:
                    print(f"    {_command(seed, options.nodes, options.faults)}", flush=True)
    seconds = time.monotonic() - began_s
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{options.runs} runs, {decisions} decisions in {seconds:.0f} s; faults: {told}")
    print(f"{broken} broke a property" if broken else "all properties held")
    return 1 if broken else 0


def _batch(work: tuple[range, int | None, int | None]) -> tuple[list[tuple[int, list[str]]], Counter[str], int]:
    seeds, nodes, faults = work
    bad, kinds, made = [], Counter[str](), 0
    for seed in seeds:
        run = simulate(plan_of(seed, nodes=nodes, faults=faults))
        kinds.update(kind for _, kind in run.hit)
        made += len(run.job.made)
        if run.broken:
            bad.append((seed, run.broken))
    return bad, kinds, made


def _plan(seed: int, nodes: int | None, faults: int | None, drop: Sequence[int]) -> Plan:
    plan = plan_of(seed, nodes=nodes, faults=faults)
    return replace(plan, faults=tuple(fault for number, fault in enumerate(plan.faults) if number not in drop))


def shrunk(seed: int, nodes: int | None = None, faults: int | None = None) -> tuple[int | None, list[int]]:
    """Fewer nodes, and numbers of faults that needn't happen, with which that seed still breaks a property."""
    breaks = lambda nodes, drop: bool(simulate(_plan(seed, nodes, faults, drop)).broken)  # noqa: E731
    drop: list[int] = []
    for number in range(len(plan_of(seed, nodes=nodes, faults=faults).faults)):
        if breaks(nodes, [*drop, number]):
            drop.append(number)
    for fewer in range(2, nodes or plan_of(seed).nodes):
        if breaks(fewer, drop):
            return fewer, drop
    return nodes, drop


def _command(seed: int, nodes: int | None, faults: int | None) -> str:
    nodes, drop = shrunk(seed, nodes, faults)
    words = ["python tests/simulation/run.py --only", str(seed)]
    words += ["--nodes", str(nodes)] if nodes is not None else []
    words += ["--faults", str(faults)] if faults is not None else []
    words += ["--drop", *map(str, drop)] if drop else []
    return " ".join(words)


def _tell(plan: Plan) -> int:
    run = simulate(plan, tell=True)
    print("\n".join(run.story))
    print(replace(plan, faults=()))
    print("\n".join(run.broken) or "all properties held")
    return 1 if run.broken else 0


if __name__ == "__main__":
    sys.exit(main())
