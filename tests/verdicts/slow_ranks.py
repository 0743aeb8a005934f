"""Is a slow rank named, and no other? Jobs of gloo ranks of random sizes and paces, half of them with a slow rank.

    python tests/verdicts/slow_ranks.py --runs 200 --jobs 12

Ranks sleep instead of computing, so that many jobs fit on one machine.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this file is run as a script
from tests.support.campaigns import launcher_records, run_job

BOUND_S = 60.0
"""From the first step to the line."""
_SECONDS = 75.0
_JOB_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One job. ``slow``: rank whose steps take ``factor`` times as long; -1: none, or all equally.

    ``jitter``: standard deviation of a rank's step, as a share of it.
    """

    seed: int
    ranks: int
    step_s: float
    jitter: float
    slow: int
    factor: float
    seconds: float = _SECONDS


@dataclass(frozen=True, kw_only=True)
class Named:
    """What was said of a job. ``after_s``: from its start to the line on its slow rank; None without one."""

    pace: Pace
    ranks: frozenset[int]
    after_s: float | None
    failed: str = ""

    @property
    def is_wrong(self) -> bool:
        """Another rank was named."""
        return bool(self.ranks - {self.pace.slow})


def draw(seed: int) -> Pace:
    """Return the job of a seed: every second one has a slow rank, every fourth ranks that are all slow."""
    chance = random.Random(seed)
    ranks = chance.choice((2, 3, 4, 6, 8))
    is_slow = seed % 2 == 0
    return Pace(
        seed=seed,
        ranks=ranks,
        step_s=chance.choice((0.1, 0.2, 0.5, 1.0)),
        jitter=chance.choice((0.0, 0.02, 0.05)) if is_slow else chance.choice((0.0, 0.05, 0.1, 0.3)),
        slow=chance.randrange(ranks) if is_slow else -1,
        factor=chance.choice((1.2, 1.3, 1.5, 2.0)),
    )


def run(pace: Pace) -> Named:
    """Run one job."""
    script = str(Path(__file__).with_name("paced.py"))
    with tempfile.TemporaryDirectory(prefix="paced-") as directory:
        words = [f"--nproc-per-node={pace.ranks}", "--max-restarts=0", script, json.dumps(asdict(pace))]
        code, output = run_job(words, Path(directory), _JOB_S)
        return read(pace, Path(directory), "" if code == 0 else output)


def read(pace: Pace, logs: Path, failed: str = "") -> Named:
    """Return what the event log of a job says."""
    began_ns, named = 0, dict[int, float]()
    for record in launcher_records(logs):
        if record["ev"] == "cycle_started":
            began_ns = record["t"]
        elif record["ev"] == "slow_rank" and not record["is_over"]:
            named.setdefault(record["rank"], (record["t"] - began_ns) / 1e9)
    return Named(pace=pace, ranks=frozenset(named), after_s=named.get(pace.slow), failed=failed)


def main() -> int:
    """Return 0 if every slow rank was named in time, and in 99 of 100 lines the right one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=6, help="so many at a time")
    options = parser.parse_args()
    named: list[Named] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for each in pool.map(run, map(draw, range(options.first, options.first + options.runs))):
            named.append(each)
            is_late = each.pace.slow >= 0 and (each.after_s is None or each.after_s > BOUND_S)
            how = "FAILED" if each.failed else "WRONG" if each.is_wrong else "LATE" if is_late else "right"
            print(f"{how}: {each.pace}: named {sorted(each.ranks)}, after {each.after_s} s", flush=True)
            if each.failed:
                print(each.failed)
    slow = [each for each in named if each.pace.slow >= 0]
    after_s = [each.after_s for each in slow if each.after_s is not None]
    lines = sum(len(each.ranks) for each in named)
    wrong = lines - len(after_s)
    in_time = sum(each <= BOUND_S for each in after_s)
    print(f"{len(after_s)} of {len(slow)} slow ranks were named, {in_time} of them within {BOUND_S:g} s", end="")
    print(f" (at most {max(after_s, default=0.0):.1f} s); {wrong} of {lines} lines named another rank")
    failed = any(each.failed for each in named)
    return 1 if failed or in_time < len(slow) or wrong > 0.01 * lines else 0


if __name__ == "__main__":
    sys.exit(main())
