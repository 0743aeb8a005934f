"""How much of its time a training makes good use of while it meets a trace of faults, under each launcher.

    make bench BENCH_ARGS="--only goodput"
    python -m tests.bench.goodput --trace tests/bench/fault_traces/three-nodes.json --picture goodput.png

The same training, trace (`fault_traces`) and scheduler (`cluster`), for the same time from the first step on.
docs/goodput.md defines what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.cluster import Cluster
from tests.bench.fault_traces import FOLDER, Fault, FaultKind, FaultTrace, read
from tests.bench.figures import Row, compare
from tests.bench.jobs import SCRIPTS, end_on_sigterm, progress
from tests.bench.stamps import Stamp, phases

__all__ = ["SYSTEMS", "Met", "account", "measure", "rows"]

TRACE, RECORDED = FOLDER / "three-nodes.json", FOLDER / "three-nodes-recorded.json"
"""The trace, and what a run with it has shown: the pages have its table and picture."""
STEP_S, FILE_EVERY, MEMORY_EVERY = 0.1, 100, 10
GROUP_TIMEOUT_S, HEARTBEAT_S = 20.0, 5.0
"""Of the process group, which is all that torchrun has; and between two heartbeats, for launchers that watch them."""
_UNDISTURBED_S = 20.0
_START_S = 120.0
_LOOK_S = 0.05


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


@dataclass(frozen=True, kw_only=True)
class Met:
    """A fault that has hit something, ``at_s`` on the clock of the stamps."""

    kind: FaultKind
    at_s: float


def measure(launchers: Sequence[str], reference: str, trace: FaultTrace | None = None) -> dict[str, Any]:
    """Measure the pace of an undisturbed training, and then each system with the trace."""
    trace = read(TRACE) if trace is None else trace
    paced = run(
        SYSTEMS["torchrun"], FaultTrace(seed=0, nodes=trace.nodes, horizon_s=_UNDISTURBED_S, faults=()), reference
    )
    step_s = _UNDISTURBED_S / max(1, paced["iterations"])
    result: dict[str, Any] = {"step_s": step_s, "horizon_s": trace.horizon_s, "systems": {}}
    for name, system in SYSTEMS.items():
        if system.launcher in launchers:
            found = result["systems"][name] = run(system, trace, reference)
            found["share"] = found["iterations"] * step_s / trace.horizon_s
            progress(f"goodput, {system.name}: {found['share']:.1%}")
    return result


def run(system: System, trace: FaultTrace, reference: str) -> dict[str, Any]:
    """Run one training up to the horizon; return its account."""
    memory_every = MEMORY_EVERY if system.memory else 0
    words = [SCRIPTS / "checkpointed.py", STEP_S, FILE_EVERY, memory_every, "{directory}"]
    variables = {
        "FT_BENCH_HEARTBEATS": str(int(system.heartbeats)),
        "FT_BENCH_GROUP_TIMEOUT": str(GROUP_TIMEOUT_S),
        "FT_SECRET": "a secret of the bench",
    }
    met: list[Met] = []
    with Cluster(
        system.launcher,
        [*map(str, words)],
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
                met.append(Met(kind=fault.kind, at_s=time.monotonic()))
        found = account(cluster.stamps(), met, cluster.ended_s, ranks=trace.nodes, began_s=began_s, until_s=due_s)
        return {**found, "requeues": cluster.requeues, "load": os.getloadavg()[0]}


def _begin(cluster: Cluster, ranks: int) -> float:
    """Return when all ranks have done their first step."""
    started_s = time.monotonic()
    while time.monotonic() < started_s + _START_S:
        cluster.look()
        if (passed := phases(cluster.stamps(), started_s, ranks)) is not None:
            return started_s + passed["step"]
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
    stamps: Iterable[Stamp],
    met: Sequence[Met],
    ended_s: Mapping[int, float],
    *,
    ranks: int,
    began_s: float,
    until_s: float,
) -> dict[str, Any]:
    """Return iterations that count, their times, and of each fault the detection, the downtime and what was redone.

    Args:
        ended_s: by PID, when a rank was seen to be gone.
        began_s, until_s: first step of all ranks, and the horizon.
    """
    stamps = [stamp for stamp in sorted(stamps, key=lambda stamp: stamp.at) if stamp.at <= until_s]
    done_s = completed(stamps, ranks)
    faults = []
    for at, each in enumerate(met):
        next_s = met[at + 1].at_s if at + 1 < len(met) else until_s
        faults.append({"kind": each.kind.value, **_of_fault(each.at_s, next_s, stamps, ended_s, ranks)})
    return {
        "iterations": sum(at > began_s for at in done_s),
        "curve": [round(at - began_s, 2) for at in done_s],
        "executed": sum(stamp.event == "step" for stamp in stamps) / ranks,
        "faults": faults,
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


def _of_fault(
    at_s: float, next_s: float, stamps: Sequence[Stamp], ended_s: Mapping[int, float], ranks: int
) -> dict[str, float | None]:
    """Return what one fault cost; None for what the next fault, or the horizon, has cut off."""
    before = {stamp.rank: stamp.pid for stamp in stamps if stamp.event == "user" and stamp.at <= at_s}
    after = {stamp.pid for stamp in stamps if stamp.event == "user" and stamp.at > at_s}
    gone_s = max((ended_s.get(pid, next_s) for pid in before.values()), default=next_s)
    again: dict[int, Stamp] = {}
    for stamp in stamps:
        if stamp.event == "step" and stamp.pid in after:
            again.setdefault(stamp.rank, stamp)
    up_s = max((stamp.at for stamp in again.values()), default=next_s) if len(again) == ranks else next_s
    reached = max(
        (stamp.number for stamp in stamps if stamp.event == "step" and stamp.at <= up_s and stamp.pid not in after),
        default=0,
    )
    is_up = up_s < next_s
    first = min(stamp.number for stamp in again.values()) if is_up else 0
    return {
        "detection_s": gone_s - at_s if gone_s < next_s else None,
        "downtime_s": up_s - at_s if is_up else None,
        "redone": max(0, reached - first + 1) if is_up else None,
    }


# -- what is shown ------------------------------------------------------------------------------------------------


def middle(system: Mapping[str, Any], what: str, kind: FaultKind | None = None) -> float | None:
    """Return the median over the faults of a kind; None if none of them has such a figure."""
    figures = [each[what] for each in system["faults"] if kind is None or each["kind"] == kind.value]
    known = [each for each in figures if each is not None]
    return statistics.median(known) if known else None


def rows(result: dict[str, Any]) -> list[Row]:
    """For the table of `make bench`: ours is the one with memory checkpoints."""
    systems = result["systems"]
    share = {name: 100 * found["share"] for name, found in systems.items()}
    return [
        compare("effective training time with a trace of faults", "%", share, more_is_better=True),
        Row("the same without memory checkpoints", "%", share.get("files")),
        *(
            compare(
                f"downtime of a {kind.value.replace('_', ' ')}",
                "s",
                {n: middle(f, "downtime_s", kind) for n, f in systems.items()},
            )
            for kind in (FaultKind.KILL, FaultKind.HANG, FaultKind.NODE_LOSS)
        ),
        compare(
            "iterations redone after a fault",
            "",
            {n: middle(f, "redone") for n, f in systems.items()},
            is_compared=False,
        ),
    ]


def markdown(result: dict[str, Any]) -> str:
    """Return the table of README and docs/goodput.md."""
    kinds = (FaultKind.KILL, FaultKind.HANG, FaultKind.NODE_LOSS)
    head = [
        "",
        "effective training time",
        *(f"down after a {kind.value.replace('_', ' ')}" for kind in kinds),
        "iterations redone",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---|" * (len(head) - 1)]
    for name, found in result["systems"].items():
        downtimes = [_shown(middle(found, "downtime_s", kind), " s") for kind in kinds]
        cells = [SYSTEMS[name].name, f"{found['share']:.0%}", *downtimes, _shown(middle(found, "redone"), "")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.2g}{unit}" if value < 10 else f"{value:.0f}{unit}"


def draw(result: dict[str, Any], trace: FaultTrace, path: str) -> None:
    """Draw iterations that count over time, one line for each system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    colours = {"torchrun": "#8a8f98", "reference": "#b07d2b", "files": "#5b9bd5", "ours": "#1f5fa8"}
    for name, found in result["systems"].items():
        curve = [0.0, *(at for at in found["curve"] if at >= 0), result["horizon_s"]]
        counts = [*range(len(curve) - 1), len(curve) - 2]
        label = f"{SYSTEMS[name].name}: {found['share']:.0%}"
        axes.step(curve, counts, where="post", color=colours[name], label=label, linewidth=2)
    ideal = result["horizon_s"] / result["step_s"]
    axes.plot(
        [0, result["horizon_s"]], [0, ideal], color="#c8ccd2", linewidth=1, linestyle="--", label="without faults"
    )
    for fault in trace.faults:
        if fault.kind is not FaultKind.SLOW_START:
            axes.axvline(fault.at_s, color="#d9534f", linewidth=0.8, alpha=0.6)
            axes.annotate(
                fault.kind.value.replace("_", " "),
                (fault.at_s, ideal),
                rotation=90,
                fontsize=8,
                color="#a33b37",
                xytext=(-3, 0),
                textcoords="offset points",
                ha="right",
                va="top",
            )
    axes.set(
        xlabel="seconds since the first step",
        ylabel="iterations done",
        xlim=(0, result["horizon_s"]),
        ylim=(0, ideal * 1.02),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def main() -> None:
    """Run all systems, print the table, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--reference", default=".venv/nvrx", help="folder with nvidia-resiliency-ext 0.4.1")
    parser.add_argument("--only", default=",".join(SYSTEMS), help="systems, for example files,ours")
    parser.add_argument("--json", type=Path, help="file for all figures; read instead if it exists")
    parser.add_argument("--picture", help="file for the picture")
    given = parser.parse_args()
    end_on_sigterm()
    trace = read(given.trace)
    if given.json is not None and given.json.exists():
        result = json.loads(given.json.read_text())
    else:
        for name in set(SYSTEMS) - set(given.only.split(",")):
            del SYSTEMS[name]
        launchers = [system.launcher for system in SYSTEMS.values()]
        result = {**measure(launchers, os.path.abspath(given.reference), trace), "trace": asdict(trace)}
        if given.json is not None:
            given.json.write_text(json.dumps(result, default=str) + "\n")
    print(markdown(result))
    if given.picture:
        draw(result, trace, given.picture)


if __name__ == "__main__":
    main()
