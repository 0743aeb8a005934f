"""``make verdicts``: does the launcher name the rank that did it, and where? Faults of ten kinds, by a seed.

Each kind is one job of 4 ranks whose cycles each meet one fault, at a random rank and iteration. What is compared is
what the launcher wrote into its event log when the cycle ended.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this file is run as a script
from tests.support.campaigns import launcher_records, run_job
from tests.verdicts.job import ITERATIONS

HANGS = ("stopped", "sleep", "spin", "gil", "collective", "pipe")
CRASHES = ("killed", "exception", "segfault", "exit")
KINDS = (*HANGS, *CRASHES)
WITHOUT_FRAME = ("killed", "exit")
"""What ends a process on the spot leaves no frame."""
RANKS = 4
TIMEOUT_S = 1.0
_JOB_S = 60.0
_CYCLE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one rank does in one cycle."""

    kind: str
    rank: int
    iteration: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the launcher said of it. ``frame_is_right`` is None where there is none to be had; seconds."""

    fault: Fault
    text: str
    named: int | None
    frame_is_right: bool | None
    collected_s: tuple[float, ...]
    kill_after_s: float | None

    @property
    def is_right(self) -> bool:
        """The rank that it named is the one."""
        return self.named == self.fault.rank


def draw(kinds: Sequence[str], runs: int, seed: int) -> list[Fault]:
    """The faults of a campaign; the same for the same arguments."""
    chance = random.Random(seed)
    return [
        Fault(kind=kind, rank=chance.randrange(RANKS), iteration=chance.randrange(ITERATIONS))
        for kind in kinds
        for _ in range(runs)
    ]


def arguments(faults: Sequence[Fault], directory: Path, *, nodes: int = 1, timeout_s: float = TIMEOUT_S) -> list[str]:
    """Of each launcher, for one job that meets these faults, one in each cycle; writes its configuration."""
    config = directory / "verdicts.yaml"
    config.write_text(f"fault_tolerance:\n  rank_section_timeouts: {{step: {timeout_s}, checkpointing: {timeout_s}}}\n")
    # each of its cycles begins at iteration 0
    options = [
        f"--nproc-per-node={RANKS // nodes}",
        f"--max-restarts={len(faults)}",
        "--ft-max-no-progress-cycles=0",
        f"--fault-tol-cfg-path={config}",
    ]
    return [*options, str(Path(__file__).with_name("job.py")), json.dumps([asdict(fault) for fault in faults])]


def run(faults: Sequence[Fault], directory: Path) -> list[Verdict]:
    """Run that job.

    Raises:
        RuntimeError: it didn't end well after the last of them.
    """
    code, output = run_job(arguments(faults, directory), directory / "logs", _JOB_S + _CYCLE_S * len(faults))
    if code != 0:
        raise RuntimeError(f"the job ended with code {code}:\n{output}")
    return read_verdicts(faults, directory / "logs")


def read_verdicts(faults: Sequence[Fault], logs: Path) -> list[Verdict]:
    """What the event logs of such a job say of each of them."""
    records = launcher_records(logs)
    return [_verdict(fault, [r for r in records if r.get("cycle") == cycle]) for cycle, fault in enumerate(faults)]


def _verdict(fault: Fault, records: Sequence[dict[str, Any]]) -> Verdict:
    cause = next(record for record in records if record["ev"] == "cycle_ended")["cause"]
    text = ", ".join(filter(None, (cause["text"], cause["detail"])))
    return Verdict(
        fault=fault,
        text=text,
        named=cause["rank"],
        frame_is_right=None if fault.kind in WITHOUT_FRAME else f" fault_{fault.kind}" in text,
        collected_s=tuple(r["took_s"] for r in records if r["ev"] == "evidence" and r.get("took_s") is not None),
        kill_after_s=_kill_after_s(records),
    )


def _kill_after_s(records: Sequence[dict[str, Any]]) -> float | None:
    """From the first verdict to the signal that its monitor sent; None if no rank was found hung."""
    verdicts = {r["pid"]: r["at_ns"] for r in records if r["ev"] == "verdict"}
    delays = [
        (r["at_ns"] - verdicts[r["pid"]]) / 1e9 for r in records if r["ev"] == "signalled" and r["pid"] in verdicts
    ]
    return max(delays, default=None)


def print_row(kind: str, verdicts: Sequence[Verdict]) -> None:
    """How many of a kind were named rightly, how long it took, and what was said of the others."""
    right = [verdict for verdict in verdicts if verdict.is_right and verdict.frame_is_right is not False]
    collected = [seconds for verdict in verdicts for seconds in verdict.collected_s]
    ended = max((verdict.kill_after_s for verdict in verdicts if verdict.kill_after_s is not None), default=None)
    told = f"{kind}: {len(right)} of {len(verdicts)} named rightly, with the frame"
    if ended is not None:
        told += f"; collected in {statistics.median(collected):.3f} s, {max(collected):.3f} s at most"
        told += f"; ended {ended:.3f} s after the verdict at most"
    print(told, *(f"  {each.fault}: {each.text}" for each in verdicts if each not in right), sep="\n", flush=True)


def main() -> int:
    """Run it; 0 if every rank that was named is the right one, and at least 95 % were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of ranks and iterations (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write every verdict there")
    options = parser.parse_args()
    verdicts = []
    for number, kind in enumerate(options.kinds.split(",")):
        directory = Path(tempfile.mkdtemp(prefix="ft_verdicts"))
        try:
            found = run(draw([kind], options.runs, options.seed + number), directory)
        finally:
            shutil.rmtree(directory)
        print_row(kind, found)
        verdicts += found
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    named = [verdict for verdict in verdicts if verdict.named is not None]
    return 0 if all(verdict.is_right for verdict in named) and len(named) >= 0.95 * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
