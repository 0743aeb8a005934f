"""The accounting beside a stopwatch: what the training script itself writes of its steps, saves and faults."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.main import main
from tests.support.launching import Launched, Launcher

pytestmark = pytest.mark.waits

SCRIPT = """
import json
import torch
import torch.distributed as dist
from megatron_ft import RankMonitorClient

FAULT_AT = 26
stamps = open(f"stamps-{RANK}", "a", buffering=1)
def stamp(kind, begin, n):
    stamps.write(json.dumps({"kind": kind, "cycle": CYCLE, "n": n, "begin": begin, "end": time.monotonic()}) + "\\n")
dist.init_process_group("gloo")
client = RankMonitorClient()
client.init_workload_monitoring()
first = int(open("saved").read()) if os.path.exists("saved") else 0
for n in range(first, 40):
    begin = time.monotonic()
    client.set_iteration(n)
    client.start_section("step")
    if (CYCLE, RANK, n) == (0, 1, FAULT_AT):
        stamp("fault", time.monotonic(), n)
        forever()
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
    client.end_section("step")
    stamp("step", begin, n)
    if n % 10 == 9:
        begin = time.monotonic()
        client.start_section("checkpointing")
        time.sleep(0.4)
        if RANK == 0:
            with open("saved.new", "w") as file:
                file.write(str(n + 1))
            os.replace("saved.new", "saved")
        dist.barrier()
        client.end_section("checkpointing")
        stamp("save", begin, n)
client.shutdown_workload_monitoring()
stamp("end", time.monotonic(), n)
"""
TOLERANCE_S, TOLERANCE = 0.8, 0.02
"""Alone on a machine, each class is within 0.3 s; in the suite, other jobs make signals and starts late."""


class Stopwatch:
    """Stamps of the ranks, and when the test started the launcher and saw its end, for which this waits."""

    def __init__(self, launched: Launched, began_s: float) -> None:
        launched.wait()
        self.began_s, self.ended_s = began_s, time.monotonic()
        self.of_ranks = [
            [json.loads(line) for line in (launched.directory / f"stamps-{rank}").read_text().splitlines()]
            for rank in (0, 1)
        ]

    def of(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return [each for each in self.of_ranks[rank] if each["kind"] == kind]

    def classes(self, down_s: float | None, again_from: int | None, stop_s: float) -> dict[str, float]:
        """Seconds of the classes. ``down_s``: the fault; ``again_from``: first step of the second cycle."""
        cycles = 1 if down_s is None or again_from is None else 2
        begins = [max(filter(None, (self._first(cycle, rank) for rank in (0, 1)))) for cycle in range(cycles)]
        ends = [stop_s] if cycles == 1 else [down_s or 0.0, stop_s]
        found = {"before": begins[0] - self.began_s, "down": 0.0, "redone": 0.0, "save": 0.0}
        found["save"] = sum(each["end"] - each["begin"] for each in self.of("save"))
        if cycles == 2:
            found["down"] = begins[1] - ends[0]
            redone = [each for each in self.of("step") if each["cycle"] == 0 and each["n"] >= (again_from or 0)]
            found["redone"] = ends[0] - redone[0]["begin"]
        total = sum(end - begin for begin, end in zip(begins, ends, strict=True))
        found["productive"] = total - found["save"] - found["redone"]
        found["after"] = self.ended_s - stop_s
        return found

    def _first(self, cycle: int, rank: int) -> float | None:
        return next((each["begin"] for each in self.of_ranks[rank] if each["cycle"] == cycle), None)


def accounted(launched: Launched, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, float], Any]:
    capsys.readouterr()
    assert main(["report", "--json", str(launched.log_dir)]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    seconds = run["goodput"]["seconds"]
    parts = {
        "before": ("launch", "start_up"),
        "down": ("detection", "restart", "waiting_for_nodes"),
        "redone": ("redone_step",),
        "save": ("checkpoint_save", "checkpoint_load"),
        "productive": ("productive_step",),
        "after": ("after_the_end",),
        "hung": ("hung",),
    }
    return {name: sum(seconds[each] for each in of) for name, of in parts.items()}, run


def check(watch: dict[str, float], capsys: pytest.CaptureFixture[str], live: Path, launched: Launched) -> Any:
    """Compare each class with the stopwatch, the sum with the wall, and the live metrics with the report."""
    told, run = accounted(launched, capsys)
    wall_s = sum(watch.values())
    for name, seconds in {"hung": 0.0, **watch}.items():
        assert told[name] == pytest.approx(seconds, abs=max(TOLERANCE_S, TOLERANCE * seconds)), (name, told, watch)
    # the process that starts the launcher, and what ends it, take some time of their own
    assert sum(told.values()) == pytest.approx(wall_s, abs=max(0.001 * wall_s, TOLERANCE_S))
    assert sum(told.values()) == pytest.approx(run["goodput"]["total_s"], rel=0.001)
    shown = dict(re.findall(r'megatron_ft_time_seconds{class="(\w+)"} (\S+)', live.read_text()))
    for name, seconds in run["goodput"]["seconds"].items():
        assert float(shown[name]) == pytest.approx(seconds, abs=1.0), name
    return run


def begin(launcher: Launcher, *observed: str) -> tuple[Launched, float, Path]:
    live = launcher.directory / "live.prom"
    # sections that aren't configured aren't recorded
    sections = "--ft-rank-section-timeouts=step:3,checkpointing:60"
    options = ("--nproc-per-node=2", "--max-restarts=2", sections, *observed, f"--ft-metrics-textfile={live}")
    return launcher.start(SCRIPT, *options), time.monotonic(), live


def stopped_s(watch: Stopwatch) -> float:
    return float(
        max(each["end"] for rank in (0, 1) for each in watch.of_ranks[rank] if each["kind"] in ("save", "step"))
    )


def test_job_with_a_restart_is_accounted_for_as_a_stopwatch_sees_it(
    fresh_launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    launched, began_s, live = begin(fresh_launcher)
    watch = Stopwatch(launched, began_s)
    (fault,) = watch.of("fault", rank=1)
    run = check(watch.classes(fault["begin"], 20, stopped_s(watch)), capsys, live, launched)
    assert run["goodput"]["redone"] == 6
    assert run["goodput"]["seconds"]["detection"] == pytest.approx(3.0, abs=0.8)
    line = re.search(r"is training again (\S+) s after", launched.err)
    assert line is not None
    assert run["cycles"][0]["training_again_after_s"] == pytest.approx(float(line[1]), abs=0.01)


def test_reported_hang_is_accounted_for_as_a_stopwatch_sees_it(
    launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    launched, began_s, live = begin(launcher, "--ft-observe-only")
    launched.wait_for("not killed .observe-only")
    time.sleep(3)
    stopping_s = time.monotonic()
    launched.signal(signal.SIGTERM)
    watch = Stopwatch(launched, began_s)
    (fault,) = watch.of("fault", rank=1)
    classes = watch.classes(None, None, fault["begin"])
    classes["hung"], classes["after"] = stopping_s - fault["begin"], watch.ended_s - stopping_s
    run = check(classes, capsys, live, launched)
    (hang,) = run["reported_hangs"]
    assert (hang["section"], hang["went_on"]) == ("step", False)
    result = json.loads((launched.log_dir / "result.json").read_text())["lives"][-1]
    assert [each["section"] for each in result["hangs"]] == ["step"]
