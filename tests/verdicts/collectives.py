"""Is a script that calls no hooks named when it deadlocks, by rank and frame, and how soon? Four ways, by a seed.

    python tests/verdicts/collectives.py --seeds 10

Each seed is one job of 3 ranks under ``--ft-watch-collectives end`` whose cycles each meet one fault, at a random rank
and iteration; in the last cycle all compute for longer than the threshold, and it has to run to its end.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this file is run as a script
from tests.support.campaigns import launcher_records, run_job

KINDS = ("skip", "sleep", "stopped", "loader")
RANKS = 3
TIMEOUT_S = 3.0
BOUND_S = 15.0
"""From the moment at which the threshold allows it to the line."""
_JOB_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one rank does in one cycle, or (``computes``) all of them."""

    kind: str
    rank: int
    iteration: int
    seconds: float = 1000.0


@dataclass(frozen=True, kw_only=True)
class Named:
    """What the launcher said of it. ``late_s``: after the threshold, from the fault on."""

    fault: Fault
    text: str
    rank: int | None
    late_s: float

    @property
    def is_right(self) -> bool:
        """Rank and frame are those."""
        return self.rank == self.fault.rank and f" fault_{self.fault.kind}" in self.text


def draw(seed: int) -> list[Fault]:
    """The faults of one job, in an order that the seed tells; at last one that is none."""
    chance = random.Random(seed)
    kinds = chance.sample(KINDS, len(KINDS))
    drawn = [Fault(kind=kind, rank=chance.randrange(RANKS), iteration=chance.randrange(1, 10)) for kind in kinds]
    return [*drawn, Fault(kind="computes", rank=0, iteration=4, seconds=2 * TIMEOUT_S)]


def arguments(faults: Sequence[Fault], *, mode: str = "end", timeout_s: float = TIMEOUT_S) -> list[str]:
    """Of the launcher of such a job."""
    options = [
        f"--nproc-per-node={RANKS}",
        f"--max-restarts={len(faults)}",
        f"--ft-watch-collectives={mode}:{timeout_s:g}",
    ]
    return [*options, str(Path(__file__).with_name("unhooked.py")), json.dumps([asdict(fault) for fault in faults])]


def read(faults: Sequence[Fault], logs: Path, output: str, *, timeout_s: float = TIMEOUT_S) -> list[Named]:
    """What the event log of its launcher says of each fault.

    Raises:
        KeyError: of one it says nothing.
    """
    at_s = {int(cycle): float(at_s) for cycle, at_s in re.findall(r"fault (\d+) ([\d.]+)", output)}
    records = {each["cycle"]: each for each in launcher_records(logs) if each["ev"] == "no_collective"}
    return [
        Named(
            fault=fault,
            text=records[cycle]["text"],
            rank=records[cycle]["rank"],
            late_s=records[cycle]["t"] / 1e9 - at_s.get(cycle, 0.0) - timeout_s,
        )
        for cycle, fault in enumerate(faults)
    ]


def run(seed: int) -> tuple[list[Named], str]:
    """Of one seed: what was named, and how the last cycle ended, "" if well."""
    faults = draw(seed)
    with tempfile.TemporaryDirectory(prefix="unhooked-") as directory:
        code, output = run_job(arguments(faults), Path(directory), _JOB_S)
        named = read(faults[:-1], Path(directory), output)
    return named, "" if code == 0 else output


def main() -> int:
    """0 if all were named in time, and no healthy cycle was ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    right = faults = healthy = 0
    worst_s = 0.0
    for seed in range(options.first, options.first + options.seeds):
        try:
            named, trouble = run(seed)
        except KeyError as error:
            print(f"seed {seed}: cycle {error} wasn't told of", flush=True)
            faults += len(KINDS)
            continue
        healthy += not trouble
        faults += len(named)
        for each in named:
            is_right = each.is_right and each.late_s <= BOUND_S
            right += is_right
            worst_s = max(worst_s, each.late_s)
            print(
                f"seed {seed}: {'right' if is_right else 'WRONG'} {each.fault} {each.late_s:.1f} s: {each.text}",
                flush=True,
            )
        if trouble:
            print(trouble)
    print(f"{right} of {faults} named by rank and frame, at most {worst_s:.1f} s after the threshold;", end=" ")
    print(f"{healthy} of {options.seeds} healthy cycles that computed for {2 * TIMEOUT_S:g} s ran to their end")
    return 0 if right == faults and healthy == options.seeds else 1


if __name__ == "__main__":
    sys.exit(main())
