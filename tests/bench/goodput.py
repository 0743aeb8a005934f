"""Goodput: how much of its time a training makes good use of while it meets a trace of faults, under each launcher.

    make bench BENCH_ARGS="--only goodput"
    python -m tests.bench.goodput --trace TRACE.json --picture goodput.png

The same training, trace and scheduler (`cluster`), for the same time from the first step on. docs/goodput.md defines
what is measured, and what a trace has.
"""

from __future__ import annotations

import argparse
import enum
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.cluster import SCRIPTS, Cluster, Stamp, end_on_sigterm, progress
from tests.bench.figures import middle, shown, table

FOLDER = Path(__file__).with_name("fault_traces")
TRACE, RECORDED = FOLDER / "three-nodes.json", FOLDER / "three-nodes-recorded.json"
"""The trace, and what a run with it has shown: the pages have its table and picture."""
STEP_S, FILE_EVERY, MEMORY_EVERY = 0.1, 100, 10
GROUP_TIMEOUT_S, HEARTBEAT_S = 20.0, 5.0
"""Of the process group, which is all that torchrun has; and between two heartbeats, for launchers that watch them."""
_UNDISTURBED_S = 20.0
_START_S = 120.0
_LOOK_S = 0.05


class FaultKind(enum.Enum):
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
    """What a job of so many nodes, with one rank each, meets until the horizon, whatever it is doing by then."""

    nodes: int
    horizon_s: float
    faults: Sequence[Fault]


@dataclass(frozen=True, kw_only=True)
class System:
    """A launcher, and how the training keeps its state beside the file."""

    name: str
    launcher: str
    heartbeats: bool = False
    memory: bool = False


SYSTEMS = {
    "torchrun": System(name="torchrun", launcher="torchrun"),
    "reference": System(name="nvidia-resiliency-ext 0.4.1", launcher="reference", heartbeats=True),
    "files": System(name="megatron_ft", launcher="ours", heartbeats=True),
    "ours": System(name="megatron_ft, memory checkpoints", launcher="ours", heartbeats=True, memory=True),
}
_HEARTBEATS = (
    *("--ft-initial-rank-heartbeat-timeout", "60"),
    *("--ft-rank-heartbeat-timeout", str(HEARTBEAT_S)),
)


def measure(reference: str | None, _runs: int = 1, trace: Path = TRACE) -> dict[str, Any]:
    """Measure the pace of an undisturbed training, and then each system with the trace."""
    faults = read(trace)
    paced = run(SYSTEMS["torchrun"], FaultTrace(nodes=faults.nodes, horizon_s=_UNDISTURBED_S, faults=()), reference)
    step_s = _UNDISTURBED_S / max(1, paced["iterations"])
    result: dict[str, Any] = {"step_s": step_s, "horizon_s": faults.horizon_s, "systems": {}}
    for name, system in SYSTEMS.items():
        if system.launcher != "reference" or reference:
            found = result["systems"][name] = run(system, faults, reference)
            found["share"] = found["iterations"] * step_s / faults.horizon_s
            progress(f"goodput, {system.name}: {found['share']:.1%}")
    return result


def read(path: Path) -> FaultTrace:
    document = json.loads(path.read_text())
    faults = [Fault(**{**each, "kind": FaultKind(each["kind"])}) for each in document["faults"]]
    return FaultTrace(nodes=document["nodes"], horizon_s=document["horizon_s"], faults=faults)


def run(system: System, trace: FaultTrace, reference: str | None) -> dict[str, Any]:
    """Run one training up to the horizon; return its account."""
    memory_every = MEMORY_EVERY if system.memory else 0
    words = [SCRIPTS / "checkpointed.py", STEP_S, FILE_EVERY, memory_every, "{directory}"]
    variables = {
        "FT_BENCH_HEARTBEATS": str(int(system.heartbeats)),
        "FT_BENCH_GROUP_TIMEOUT": str(GROUP_TIMEOUT_S),
        "FT_SECRET": "a secret of the bench",
    }
    met: list[tuple[FaultKind, float]] = []
    with Cluster(
        system.launcher,
        map(str, words),
        nodes=trace.nodes,
        reference=reference,
        options=_HEARTBEATS if system.heartbeats else (),
        variables=variables,
    ) as cluster:
        began_s = _begin(cluster, trace.nodes)
        for fault in [*trace.faults, None]:
            due_s = began_s + (trace.horizon_s if fault is None else fault.at_s)
            while (left_s := due_s - time.monotonic()) > 0:
                cluster.look()
                time.sleep(min(_LOOK_S, left_s))
            if fault is not None and inject(cluster, fault):
                met.append((fault.kind, time.monotonic()))
        return account(cluster.stamps(), met, ranks=trace.nodes, began_s=began_s, until_s=due_s)


def _begin(cluster: Cluster, ranks: int) -> float:
    """Return when all ranks have done their first step."""
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        cluster.look()
        if done_s := completed(cluster.stamps(), ranks):
            return done_s[0]
        time.sleep(_LOOK_S)
    raise RuntimeError(f"the training has not started:\n{cluster.output()}")


def inject(cluster: Cluster, fault: Fault) -> bool:
    """Let it happen. Return False if it is none, or has hit nothing because the job was down."""
    match fault.kind:
        case FaultKind.KILL:
            return cluster.signal(fault.target, signal.SIGKILL)
        case FaultKind.HANG:
            return cluster.signal(fault.target, signal.SIGUSR1)
        case FaultKind.NODE_LOSS:
            return cluster.lose(fault.target)
        case FaultKind.SLOW_START:
            (cluster.directory / f"slow-{fault.target}").write_text(str(fault.seconds))
    return False


# -- the account, from the stamps --------------------------------------------------------------------------------


def account(
    stamps: Sequence[Stamp], met: Sequence[tuple[FaultKind, float]], *, ranks: int, began_s: float, until_s: float
) -> dict[str, Any]:
    """Return iterations that count, their times, and of each fault the downtime and what was redone.

    Args:
        stamps: in the order of time.
        met: faults that have hit something, and when.
        began_s, until_s: first step of all ranks, and the horizon.
    """
    stamps = [stamp for stamp in stamps if stamp.at <= until_s]
    done_s = completed(stamps, ranks)
    next_s = [*(at_s for _, at_s in met[1:]), until_s]
    return {
        "iterations": sum(at > began_s for at in done_s),
        "curve": [round(at - began_s, 2) for at in done_s],
        "faults": [
            {"kind": kind.value, **_of_fault(at_s, until, stamps, ranks)}
            for (kind, at_s), until in zip(met, next_s, strict=False)
        ],
    }


def completed(stamps: Iterable[Stamp], ranks: int) -> list[float]:
    """Return when each iteration, from the first on, was done by all ranks for the first time."""
    first: dict[int, dict[int, float]] = {}
    for stamp in stamps:
        if stamp.event == "step":
            first.setdefault(stamp.number, {}).setdefault(stamp.rank, stamp.at)
    found: list[float] = []
    while len(first.get(len(found) + 1, {})) == ranks:
        found.append(max(first[len(found) + 1].values()))
    return found


def _of_fault(at_s: float, next_s: float, stamps: Sequence[Stamp], ranks: int) -> dict[str, float | None]:
    """Return what one fault cost; None for what the next fault, or the horizon, has cut off."""
    after = {stamp.pid for stamp in stamps if stamp.event == "user" and stamp.at > at_s}
    steps = [stamp for stamp in stamps if stamp.event == "step"]
    again: dict[int, Stamp] = {}
    for stamp in steps:
        if stamp.pid in after:
            again.setdefault(stamp.rank, stamp)
    up_s = max((stamp.at for stamp in again.values()), default=next_s)
    if len(again) < ranks or up_s >= next_s:
        return {"downtime_s": None, "redone": None}
    reached = max((stamp.number for stamp in steps if stamp.at <= up_s and stamp.pid not in after), default=0)
    first = min(stamp.number for stamp in again.values())
    return {"downtime_s": up_s - at_s, "redone": max(0, reached - first + 1)}


# -- what is shown ------------------------------------------------------------------------------------------------


def over_faults(system: Mapping[str, Any], what: str, kind: FaultKind | None = None) -> float | None:
    """Return the median over the faults of a kind; None if none of them has such a figure."""
    return middle(each[what] for each in system["faults"] if kind is None or each["kind"] == kind.value)


def table_of(result: dict[str, Any]) -> str:
    """Return the table of README and docs/goodput.md."""
    kinds = (FaultKind.KILL, FaultKind.HANG, FaultKind.NODE_LOSS)
    down = [f"down after a {kind.value.replace('_', ' ')}" for kind in kinds]
    rows = []
    for name, found in result["systems"].items():
        downtimes = [shown(over_faults(found, "downtime_s", kind), " s") for kind in kinds]
        rows.append([SYSTEMS[name].name, f"{found['share']:.0%}", *downtimes, shown(over_faults(found, "redone"))])
    return table(["", "effective training time", *down, "iterations redone"], rows)


def draw(result: dict[str, Any], trace: FaultTrace, path: str) -> None:
    """Draw iterations that count over time, one line for each system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    axes, horizon_s = figure.subplots(), result["horizon_s"]
    ideal = horizon_s / result["step_s"]
    for name, found in result["systems"].items():
        curve = [0.0, *(at for at in found["curve"] if at >= 0), horizon_s]
        counts = [*range(len(curve) - 1), len(curve) - 2]
        axes.step(curve, counts, where="post", label=f"{SYSTEMS[name].name}: {found['share']:.0%}", linewidth=2)
    axes.plot([0, horizon_s], [0, ideal], color="silver", linestyle="--", label="without faults")
    for fault in trace.faults:
        if fault.kind is not FaultKind.SLOW_START:
            axes.axvline(fault.at_s, color="tab:red", linewidth=0.8)
            axes.text(fault.at_s, ideal, fault.kind.value.replace("_", " "), rotation=90, ha="right", va="top")
    axes.set(xlabel="seconds since the first step", ylabel="iterations done", xlim=(0, horizon_s), ylim=(0, ideal))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--reference", default=".venv/nvrx", help="folder with nvidia-resiliency-ext 0.4.1")
    parser.add_argument("--json", type=Path, help="file for all figures; read instead if it exists")
    parser.add_argument("--picture", help="file for the picture")
    given = parser.parse_args()
    end_on_sigterm()
    if given.json is not None and given.json.exists():
        result = json.loads(given.json.read_text())
    else:
        reference = os.path.abspath(given.reference)
        result = measure(reference if os.path.isdir(reference) else None, trace=given.trace)
        if given.json is not None:
            given.json.write_text(json.dumps(result) + "\n")
    print(table_of(result))
    if given.picture:
        draw(result, read(given.trace), given.picture)


if __name__ == "__main__":
    main()
