"""``make bench``: what this package costs, beside torchrun and nvidia-resiliency-ext, measured in the same run.

Prints one table and writes the same figures as JSON. Ratios are theirs divided by ours: above 1 ours is better.
Runs of the peers are interleaved, so that a slow minute of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ONE_RANK = HERE / "one_rank.py"
FIRST_LINE = "import time, os; open(os.environ['FT_BENCH_STAMP'], 'a').write(f'{time.monotonic()}\\n')\n"
TIMEOUT_S = 1.0


def environment(library: str, reference: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**env, "PYTHONPATH": reference} if library == "reference" else env


def measure_hooks(libraries: list[str], reference: str, runs: int) -> dict[str, Any]:
    results: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
    for _ in range(runs):
        for library in libraries:
            done = subprocess.run(
                [sys.executable, str(ONE_RANK), library, "hooks"],
                env=environment(library, reference),
                capture_output=True,
                text=True,
                check=True,
            )
            results[library].append(json.loads(done.stdout.splitlines()[-1]))
    return {library: middle(found) for library, found in results.items()}


def middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure over the runs."""
    first = found[0]
    return {
        key: middle([run[key] for run in found])
        if isinstance(value, dict)
        else statistics.median(run[key] for run in found)
        for key, value in first.items()
    }


def burn(stop: Any) -> None:
    while not stop.is_set():
        sum(range(10_000))


@contextlib.contextmanager
def loaded_machine() -> Iterator[None]:
    """One busy process per core."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    burners = [context.Process(target=burn, args=(stop,), daemon=True) for _ in range(os.cpu_count() or 1)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        stop.set()
        for burner in burners:
            burner.join()


def measure_lateness(library: str, reference: str, count: int, at_once: int) -> list[float]:
    """Seconds from the deadline to the death of a hung rank; never negative if no rank is ended too early."""
    lateness: list[float] = []
    while len(lateness) < count:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(ONE_RANK), library, "hang", str(TIMEOUT_S)],
                env=environment(library, reference),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            for _ in range(min(at_once, count - len(lateness)))
        ]
        lateness += wait_for_ends(ranks)
    return lateness


def wait_for_ends(ranks: list[subprocess.Popen[str]]) -> list[float]:
    ended: dict[int, float] = {}
    poller = select.poll()
    pidfds = {os.pidfd_open(rank.pid): rank for rank in ranks}
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    while len(ended) < len(ranks):
        for pidfd, _ in poller.poll():
            ended[pidfd] = time.monotonic()
            poller.unregister(pidfd)
    lateness = []
    for pidfd, rank in pidfds.items():
        assert rank.stdout is not None
        began = json.loads(rank.stdout.readline())["began"]
        lateness.append(ended[pidfd] - began - TIMEOUT_S)
        rank.stdout.close()
        rank.wait()
        os.close(pidfd)
    return lateness


def measure_launch(libraries: list[str], reference: str, runs: int) -> dict[str, float]:
    """Seconds from the start of the launcher to the first line of the script, the later of two ranks."""
    commands = {
        "ours": ["-m", "megatron_ft.launcher"],
        "torchrun": ["-m", "torch.distributed.run"],
        "reference": [
            *("-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
            *("--ft-rank-heartbeat-timeout", "60", "--ft-enable-nic-monitor", "false"),
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in [*libraries, "torchrun"]}
    with tempfile.TemporaryDirectory(prefix="ft-bench-") as directory:
        script = Path(directory, "first_line.py")
        script.write_text(FIRST_LINE)
        for run in range(runs):
            for name, found in times.items():
                stamps = Path(directory, f"{name}-{run}")
                env = environment(name, reference)
                env |= {"FT_BENCH_STAMP": str(stamps), "XDG_STATE_HOME": directory, "OMP_NUM_THREADS": "1"}
                began = time.monotonic()
                subprocess.run(
                    [sys.executable, *commands[name], "--nproc-per-node", "2", str(script)],
                    env=env,
                    capture_output=True,
                    check=True,
                )
                found.append(max(float(line) for line in stamps.read_text().split()) - began)
    return {name: statistics.median(found) for name, found in times.items()}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def rows(result: dict[str, Any]) -> list[tuple[str, str, float, dict[str, float]]]:
    """(what, unit, ours, theirs by name) for the table."""
    hooks, launch = result["hooks"], result["launch_to_user_code_s"]
    late = result["lateness_s"]

    def others(pick: Any) -> dict[str, float]:
        return {name: pick(found) for name, found in hooks.items() if name != "ours"}

    table = []
    for what, key, figure in (
        ("start/end pair of a section, median", "pair", "median_us"),
        ("start/end pair of a section, p99", "pair", "p99_us"),
        ("heartbeat, median", "heartbeat", "median_us"),
    ):
        table.append((what, "us", hooks["ours"][key][figure], others(lambda f, k=key, g=figure: f[k][g])))
    memory = others(lambda f: f["monitor_pss_mib"])
    table.append(("monitor's memory (PSS)", "MiB", hooks["ours"]["monitor_pss_mib"], memory))
    for what, share in (("median", 0.5), ("p99", 0.99)):
        theirs = {name: percentile(f, share) for name, f in late.items() if name != "ours"}
        table.append(
            (f"hang ended after its deadline, {what}", "ms", percentile(late["ours"], share) * 1e3,
             {name: value * 1e3 for name, value in theirs.items()})
        )  # fmt: skip
    theirs = {name: value for name, value in launch.items() if name != "ours"}
    table.append(("launch to the script's first line, 2 ranks", "s", launch["ours"], theirs))
    return table


def print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    peers = {"torchrun": "torchrun", "reference": "nvidia-resiliency-ext 0.4.1"}
    table = Table(title=f"{result['machine']}, timeout of the hangs {TIMEOUT_S:g} s, machine loaded during them")
    table.add_column("")
    table.add_column("megatron_ft", justify="right")
    for name in peers.values():
        table.add_column(name, justify="right")
        table.add_column("ratio", justify="right")
    for what, unit, ours, theirs in rows(result):
        cells = [what, f"{ours:.3g} {unit}"]
        for name in peers:
            value = theirs.get(name)
            cells += ["-", "-"] if value is None else [f"{value:.3g} {unit}", f"{value / ours:.2f}x"]
        table.add_row(*cells)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", default=".venv/nvrx", help="folder with nvidia-resiliency-ext 0.4.1")
    parser.add_argument("--json", default="out/bench.json", help="where the figures go")
    parser.add_argument("--runs", type=int, default=5, help="runs of each launch, and of the hooks")
    parser.add_argument("--hangs", type=int, default=100, help="hung ranks of ours; a tenth of them of the reference")
    args = parser.parse_args()
    reference = os.path.abspath(args.reference)
    libraries = ["ours"]
    if os.path.isdir(os.path.join(reference, "nvidia_resiliency_ext")):
        libraries.append("reference")
    else:
        print(f"bench: no reference in {args.reference}; measuring without it", file=sys.stderr)
    result: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "timeout_s": TIMEOUT_S}
    print("bench: hooks and memory", file=sys.stderr)
    result["hooks"] = measure_hooks(libraries, reference, args.runs)
    print("bench: detection on a loaded machine", file=sys.stderr)
    with loaded_machine():
        counts = {"ours": args.hangs, "reference": max(4, args.hangs // 10)}
        result["lateness_s"] = {
            library: measure_lateness(library, reference, counts[library], at_once=4) for library in libraries
        }
    print("bench: launch", file=sys.stderr)
    result["launch_to_user_code_s"] = measure_launch(libraries, reference, args.runs)
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    print_table(result)
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
