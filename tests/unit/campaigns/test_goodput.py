"""Traces of faults, and the account of a training that has met one."""

from __future__ import annotations

import json

import pytest

from tests.bench import fault_traces, goodput
from tests.bench.fault_traces import FOLDER, FaultKind
from tests.bench.goodput import Met, account, completed, markdown, rows
from tests.bench.stamps import Stamp

RANKS = 2


def process(pid: int, rank: int, began_s: float, first: int, last: int, step_s: float = 1.0) -> list[Stamp]:
    """A process of a rank, and its iterations."""
    steps = [Stamp(rank, pid, "step", at, began_s + (at - first + 1) * step_s) for at in range(first, last + 1)]
    return [Stamp(rank, pid, "user", 0, began_s), *steps]


def start(pids: tuple[int, int], began_s: float, first: int, last: int) -> list[Stamp]:
    return [stamp for rank, pid in enumerate(pids) for stamp in process(pid, rank, began_s, first, last)]


STAMPS = [*start((10, 11), 100.0, 1, 20), *start((20, 21), 130.0, 16, 40)]
"""Killed at 120.5 after 20 iterations, of which 15 were kept; again from 130 on."""
KILLED = [Met(kind=FaultKind.KILL, at_s=120.5)]
ENDED_S = {10: 121.0, 11: 122.5}


def of(met: list[Met], until_s: float = 150.0) -> dict[str, object]:
    found = account(STAMPS, met, ENDED_S, ranks=RANKS, began_s=101.0, until_s=until_s)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*-nodes.json")), ids=lambda path: path.stem)
def test_trace_in_the_repository_is_that_of_its_seed(path: object) -> None:
    trace = fault_traces.read(path)  # type: ignore[arg-type]
    assert trace == fault_traces.draw(trace.seed, nodes=trace.nodes, horizon_s=trace.horizon_s)
    assert {FaultKind.KILL, FaultKind.HANG, FaultKind.NODE_LOSS} <= {each.kind for each in trace.faults}


def test_faults_are_apart_and_leave_time_at_the_end() -> None:
    for seed in range(50):
        times = [each.at_s for each in fault_traces.draw(seed).faults if each.kind is not FaultKind.SLOW_START]
        assert all(20.0 <= after - before <= 36.1 for before, after in zip([0.0, *times], times, strict=False))
        assert times[-1] <= 160.0
    assert fault_traces.draw(1) != fault_traces.draw(2)


def test_iterations_count_once_and_when_the_last_rank_has_done_them() -> None:
    stamps = [*process(1, 0, 0.0, 1, 3), *process(2, 1, 0.5, 1, 2), *process(3, 0, 10.0, 2, 3)]
    assert completed(stamps, RANKS) == [1.5, 2.5]


def test_fault_has_a_detection_a_downtime_and_iterations_that_are_redone() -> None:
    found = of(KILLED)
    assert found["faults"] == [{"kind": "kill", "detection_s": 2.0, "downtime_s": 10.5, "redone": 5}]
    assert found["iterations"] == 35 - 1, "the first one is where the clock starts"


def test_downtime_that_the_next_fault_or_the_horizon_cuts_off_has_no_figure() -> None:
    none = {"downtime_s": None, "redone": None}
    assert of(KILLED, until_s=130.5)["faults"] == [{"kind": "kill", "detection_s": 2.0, **none}]
    first, second = of([*KILLED, Met(kind=FaultKind.HANG, at_s=121.5)])["faults"]  # type: ignore[misc]
    assert first == {"kind": "kill", "detection_s": None, **none}
    assert second["downtime_s"] == pytest.approx(9.5)


def test_pages_show_the_table_of_the_recorded_run() -> None:
    recorded = json.loads(goodput.RECORDED.read_text())
    table = markdown(recorded)
    for page in ("README.md", "docs/goodput.md"):
        assert table in (fault_traces.FOLDER.parents[2] / page).read_text(), page
    assert next(row.what for row in rows(recorded)) == "effective training time with a trace of faults"
