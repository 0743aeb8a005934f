"""Traces of faults that a training job meets, as data files that others can replay: `tests/bench/fault_traces/`.

    python -m tests.bench.fault_traces --seed 1 > tests/bench/fault_traces/three-nodes.json

A trace says what happens how many seconds after the first step, whatever the job is doing by then. So a job that is
down for longer meets no fault more often, but has trained less when the horizon is reached.
"""

from __future__ import annotations

import argparse
import enum
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["FOLDER", "Fault", "FaultKind", "FaultTrace", "draw", "read"]

FOLDER = Path(__file__).parent / "fault_traces"


class FaultKind(enum.Enum):
    """What happens."""

    KILL = "kill"
    """SIGKILL for the process of a rank."""
    HANG = "hang"
    """A rank stops working, and its process stays."""
    NODE_LOSS = "node_loss"
    """SIGKILL for the launcher of a node and everything that it has started."""
    SLOW_START = "slow_start"
    """The next process of a rank takes ``seconds`` longer to start. No fault by itself."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One event, ``at_s`` after the first step. ``target``: a rank, or for NODE_LOSS a node."""

    at_s: float
    kind: FaultKind
    target: int
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FaultTrace:
    """What a job of so many nodes, with one rank each, meets until the horizon."""

    seed: int
    nodes: int
    horizon_s: float
    faults: tuple[Fault, ...]


_MIX = (FaultKind.KILL, FaultKind.HANG, FaultKind.NODE_LOSS, FaultKind.KILL, FaultKind.HANG)
"""Kills and hangs are the more frequent ones."""
_BETWEEN_S = (20.0, 36.0)
_SLOW_SHARE, _SLOW_S = 0.3, (3.0, 6.0)
"""Share of the faults after which a rank starts slowly, and by how much."""


def draw(seed: int, *, nodes: int = 3, horizon_s: float = 180.0) -> FaultTrace:
    """Return the trace of a seed; the last fault leaves time to go on after it."""
    chance, at_s, faults = random.Random(seed), 0.0, list[Fault]()
    kinds: list[FaultKind] = []
    while (at_s := round(at_s + chance.uniform(*_BETWEEN_S), 1)) < horizon_s - _BETWEEN_S[0]:
        kinds = kinds or chance.sample(_MIX, len(_MIX))
        if chance.random() < _SLOW_SHARE:
            seconds = round(chance.uniform(*_SLOW_S), 1)
            faults.append(Fault(at_s=at_s, kind=FaultKind.SLOW_START, target=chance.randrange(nodes), seconds=seconds))
        faults.append(Fault(at_s=at_s, kind=kinds.pop(), target=chance.randrange(nodes)))
    return FaultTrace(seed=seed, nodes=nodes, horizon_s=horizon_s, faults=tuple(faults))


def read(path: Path) -> FaultTrace:
    """Read a trace."""
    document = json.loads(path.read_text())
    faults = tuple(Fault(**{**each, "kind": FaultKind(each["kind"])}) for each in document.pop("faults"))
    return FaultTrace(**document, faults=faults)


def text(trace: FaultTrace) -> str:
    """Return the text of a trace's file."""
    document = asdict(trace)
    rows = [json.dumps({**each, "kind": each["kind"].value}) for each in document.pop("faults")]
    head = json.dumps(document, indent=2).removesuffix("\n}")
    return head + ',\n  "faults": [\n    ' + ",\n    ".join(rows) + "\n  ]\n}\n"


def main() -> None:
    """Print one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--horizon", type=float, default=180.0, help="seconds")
    given = parser.parse_args()
    print(text(draw(given.seed, nodes=given.nodes, horizon_s=given.horizon)), end="")


if __name__ == "__main__":
    main()
