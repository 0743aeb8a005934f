"""A script that calls no hooks, whose ranks deadlock in four ways by a seed: what the launcher is to say of each.

One job of 3 ranks under ``--ft-watch-collectives end`` meets one fault in each cycle, at a random rank and iteration.
In the last cycle all compute for longer than the threshold, and it has to run to its end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.campaigns import launcher_records

KINDS = ("skip", "sleep", "stopped", "loader")
RANKS = 3
TIMEOUT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one rank does in one cycle, or (``computes``) all of them."""

    kind: str
    rank: int
    iteration: int
    seconds: float = 1000.0


@dataclass(frozen=True, kw_only=True)
class Named:
    """What the launcher said of it."""

    fault: Fault
    text: str
    rank: int | None

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


def read(faults: Sequence[Fault], logs: Path) -> list[Named]:
    """What the event log of its launcher says of each fault.

    Raises:
        KeyError: of one it says nothing.
    """
    records = {each["cycle"]: each for each in launcher_records(logs) if each["ev"] == "hang_reported"}
    return [
        Named(fault=fault, text=records[cycle]["text"], rank=records[cycle]["rank"])
        for cycle, fault in enumerate(faults)
    ]
