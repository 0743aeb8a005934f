"""Goodput, margins and the grid of a run, from logs whose right answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ft.cli.analysis import raster
from megatron_ft.cli.analysis.analysis import Analysis, analyze
from megatron_ft.cli.analysis.failures import failures_of
from megatron_ft.cli.analysis.interval_lengths import HEARTBEATS, OUT_OF_SECTION, Interval
from megatron_ft.cli.analysis.steps import iterations_over_time, step_times
from megatron_ft.cli.logs.read import read_directory
from megatron_ft.cli.logs.runs import split_runs
from megatron_ft.cli.report import summary_document
from tests.support.generated_logs import (
    END,
    HEARTBEAT,
    ITERATION,
    START,
    GeneratedJob,
    minute_records,
    write_job,
)
from tests.unit.cli.analysis.test_report_cycles import Logs, ended, first_iteration, started

S = 1_000_000_000
HUNG = {"kind": "section", "section": "step", "elapsed_s": 9.0, "timeout_s": 9.0}


def only(directory: Path) -> Analysis:
    (run,) = split_runs(read_directory(directory))
    return analyze(run)


def row(analysis: Analysis, name: str) -> Interval:
    (found,) = [each for each in analysis.intervals if each.name == name]
    return found


def told(
    rank: int, cycle: int, begin: float, *events: tuple[float, int, int], names: tuple[str, ...] = ("step", "save")
) -> list[Any]:
    """All that the log has of a rank whose monitor saw these events."""
    whole = [(int(at * S), kind, what) for at, kind, what in events]
    return [_logged(each) for each in minute_records(rank, cycle, list(names), int(begin * S), whole)]


def _logged(record: dict[str, Any]) -> Any:
    return (record["t"] / S, record["ev"], {key: record[key] for key in record if key not in ("t", "ev")})


def iterations(first: int, count: int, at: float) -> list[tuple[float, int, int]]:
    """One a second, "step" open for the first 0.6 s of each."""
    events: list[tuple[float, int, int]] = []
    for index in range(count):
        events += [(at + index, ITERATION, first + index), (at + index, START, 0), (at + index + 0.6, END, 0)]
    return events


def write_crash(logs: Logs) -> None:
    """Cycle 0 begins iterations 0 to 9 at 10.0 s and fails in the last; cycle 1 does 6 to 15 from 30.0 s."""
    logs.write(
        "launcher",
        (1.0, "cycle_started", started(0, 0)),
        (20.0, "cycle_ended", ended(0, "crash", 0, "rank 0 exited with code 1", 9)),
        (21.0, "cycle_started", started(1, 0)),
        (42.0, "cycle_ended", {"cycle": 1, "outcome": "succeeded", "cause": None, "iteration": 15}),
    )
    logs.write(
        "monitor",
        (2.0, "attached", {"rank": 0, "cycle": 0, "pid": 1}),
        (10.5, "first_iteration", first_iteration(0, 0, 0, 10.0)),
        *told(0, 0, 2.0, *iterations(0, 10, 10.0)[: 3 * 9 + 2]),
        (19.5, "rank_gone", {"rank": 0, "cycle": 0, "pid": 1, "iteration": 9}),
        (22.0, "attached", {"rank": 0, "cycle": 1, "pid": 2}),
        (30.5, "first_iteration", first_iteration(0, 1, 6, 30.0)),
        *told(0, 1, 22.0, *iterations(6, 10, 30.0)),
        (41.0, "rank_gone", {"rank": 0, "cycle": 1, "pid": 2, "iteration": 15}),
        (41.5, "timeouts", {"rank": 0, "cycle": 1, "sections": {"step": 3.0, "save": 5.0}, "out_of_section": None}),
    )


def test_intervals_table_shows_timeouts_beside_observed_lengths(tmp_path: Path) -> None:
    write_crash(Logs(tmp_path))
    analysis = only(tmp_path)
    step = row(analysis, "step")
    assert (step.timeout_s, step.count, step.hangs) == (3.0, 19, 0)  # the one of iteration 9 never ended
    assert step.longest_s == pytest.approx(0.6)
    assert step.margin == pytest.approx(5.0)
    outside = row(analysis, OUT_OF_SECTION)
    assert (outside.timeout_s, outside.margin, outside.count) == (None, None, 9 + 9 + 2)
    assert outside.left_out_s == pytest.approx(8.0)  # from the attachment to the first section
    assert outside.longest_s == pytest.approx(0.42, abs=0.021)  # the end of its bucket
    assert outside.quantile(0.5) == pytest.approx(0.4, rel=0.12)
    never = row(analysis, "save")
    assert (never.timeout_s, never.count, never.longest_s, never.margin) == (5.0, 0, None, None)
    assert HEARTBEATS not in [each.name for each in analysis.intervals]


def test_a_hung_section_is_no_observed_interval(tmp_path: Path) -> None:
    """Rank 1's step hangs; woken to be ended, it closes it. Rank 0 really took 2 s. The smaller timeout counts."""
    logs = Logs(tmp_path)
    verdict = {**HUNG, "rank": 1, "cycle": 0, "since_ns": 20 * S, "at_ns": 29 * S}
    logs.write(
        "launcher",
        (1.0, "cycle_started", started(0, 0, 1)),
        (30.0, "cycle_ended", ended(0, "hang", 1, "rank 1 hung", 9)),
    )
    logs.write(
        "monitor",
        (2.0, "timeouts", {"rank": 0, "cycle": 0, "sections": {"step": 99.0}, "out_of_section": 50.0}),
        (3.0, "timeouts", {"rank": 0, "cycle": 0, "sections": {"step": 10.0}, "out_of_section": 50.0}),
        *told(0, 0, 4.0, (10.0, START, 0), (12.0, END, 0), (12.5, START, 0)),
    )
    logs.write(
        "monitor",
        (3.0, "timeouts", {"rank": 1, "cycle": 0, "sections": {"step": 9.0}, "heartbeat": 30.0}),
        *told(
            *(1, 0, 4.0, (10.0, START, 0), (11.0, END, 0), (15.0, HEARTBEAT, 0), (18.0, HEARTBEAT, 0)), (20.0, START, 0)
        ),
        (29.0, "verdict", verdict),
    )
    analysis = only(tmp_path)
    step = row(analysis, "step")
    assert (step.timeout_s, step.count, step.hangs) == (9.0, 2, 1)
    assert (step.longest_s, step.longest_rank) == (2.0, 0)
    assert step.margin == pytest.approx(4.5)
    assert row(analysis, HEARTBEATS).longest_s == 3.0
    assert row(analysis, OUT_OF_SECTION).left_out_s == 9.0  # of rank 1, before it opened the hung one


def states(analysis: Analysis, edges: list[float], rank: int = 0) -> list[str]:
    offset = analysis.timeline.end_ns - int(analysis.timeline.end_ns / S) * S
    begin = analysis.timeline.begin_ns
    grid = raster.rasterize(analysis.timeline, np.array([begin + int(edge * S) for edge in edges], dtype=np.int64))
    assert offset >= 0
    names = [name for name, _ in raster.states_of(analysis.timeline.names)]
    return [names[state] for state in grid[analysis.timeline.ranks.index(rank)]]


def test_the_grid_shows_intervals_where_they_were_and_sums_as_such(tmp_path: Path) -> None:
    """Of nine steps in a minute only the sum is known: they took more than a tenth of it. Of a save all is known."""
    logs = Logs(tmp_path)
    logs.write("launcher", (1.0, "cycle_started", started(0, 0)))
    steps = iterations(0, 9, 10.0)
    saved = ((25.0, START, 1), (29.0, END, 1))
    logs.write("monitor", (2.0, "attached", {"rank": 0, "cycle": 0, "pid": 1}), *told(0, 0, 2.0, *steps, *saved))
    analysis = only(tmp_path)
    expected = ["out of section"] * 3 + ["step (summed up)", "out of section"]
    assert states(analysis, [2, 5, 9, 10, 18, 24]) == expected
    assert states(analysis, [25, 26, 29]) == ["save"] * 2


def test_the_grid_shows_a_hang_however_short_and_what_is_unknown(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    verdict = {**HUNG, "rank": 0, "cycle": 0, "since_ns": 50 * S, "at_ns": 51 * S}
    logs.write(
        "launcher",
        (1.0, "cycle_started", started(0, 0, 1)),
        (52.0, "cycle_ended", ended(0, "hang", 0, "rank 0 hung", 9)),
        (99.0, "cycle_started", started(1, 0, 1)),
    )
    events = ((3.0, START, 0), (10.0, START, 1), (20.0, END, 1), (21.0, END, 0), (50.0, START, 0))
    logs.write("monitor", *told(0, 0, 2.0, *events), (51.0, "verdict", verdict))
    logs.write("monitor", (2.0, "attached", {"rank": 1, "cycle": 0, "pid": 1}))
    analysis = only(tmp_path)
    expected = ["step", "save", "out of section", "out of section", "hung"]
    assert states(analysis, [4, 9, 20, 30, 44.9, 60]) == expected
    assert states(analysis, [3, 30, 60], rank=1) == ["nothing recorded"] * 2
    (failure,) = failures_of(analysis.timeline)
    assert (failure.rank, failure.cycle, analysis.timeline.since(failure.at_ns)) == (0, 0, 51.0)
    assert failure.from_ns < analysis.timeline.begin_ns + 49 * S
    assert failure.to_ns == analysis.timeline.end_ns  # where the logs end


def test_a_hang_that_was_only_reported_is_drawn_and_counted_once(tmp_path: Path) -> None:
    """Both ranks were overdue; the review names rank 1. Rank 0 waits for it."""
    logs = Logs(tmp_path)
    report = {"cycle": 0, "rank": 1, "section": "step", "iteration": 3, "elapsed_s": 9.5, "text": "rank 1 sleeps"}
    verdict = {**HUNG, "cycle": 0, "iteration": 3, "since_ns": 20 * S, "at_ns": 29 * S, "observed_only": True}
    logs.write(
        "launcher",
        (1.0, "cycle_started", started(0, 0, 1)),
        *((29.0, "verdict", {**verdict, "rank": rank}) for rank in (0, 1)),
        (29.5, "hang_reported", report),
        (60.0, "cycle_ended", {"cycle": 0, "outcome": "stopped"}),
    )
    for rank in (0, 1):
        logs.write("monitor", *told(rank, 0, 2.0, *iterations(0, 3, 10.0), (20.0, START, 0)))
    analysis = only(tmp_path)
    assert states(analysis, [21, 40, 59], rank=1) == ["hung"] * 2
    assert states(analysis, [21, 40, 59], rank=0) == ["waits for the hung rank"] * 2
    assert row(analysis, "step").hangs == 1
    (hang,) = json.loads(json.dumps(summary_document(analysis)))["reported_hangs"]
    assert (hang["rank"], hang["seconds"], hang["went_on"]) == (1, 40.0, False)


def test_step_times_are_those_of_the_median_and_the_slowest_rank(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.write("launcher", (1.0, "cycle_started", started(0, 0, 1, 2)))
    for rank, step_s in enumerate((1.0, 1.0, 1.5)):
        events = [(5.0 + number * step_s, ITERATION, number) for number in range(11)]
        logs.write("monitor", *told(rank, 0, 2.0, *events))
    (point,) = step_times(only(tmp_path).timeline)
    assert (point["median"], point["slowest"], point["rank"]) == (1.0, 1.5, 2)
    assert iterations_over_time(only(tmp_path).timeline) == [(5.0, 0), (15.0, 10)]


def test_losses_are_counted_and_nothing_else_changes(tmp_path: Path) -> None:
    write_job(tmp_path, GeneratedJob(ranks=2, steps=60, lost_in_minute=1))
    analysis = only(tmp_path)
    assert analysis.timeline.lost > 0
    assert row(analysis, "step").count < 120
    longest = row(analysis, "step").longest_s
    assert longest is not None
    assert longest < 0.5  # nothing reaches over the gap
    assert analysis.run.passed_over == 0


NINE_STEPS = [(3.0 + number, ITERATION, number) for number in range(10)]
"""In nine seconds; in the tenth step there is a hang of minutes."""
SHORT = [(3.0 + number + part, kind, 0) for number in range(9) for part, kind in ((0.1, START), (0.5, END))]
LONG = [(3.0 + 5 * number + part, kind, 0) for number in range(10) for part, kind in ((0.1, START), (4.9, END))]
"""In a single iteration."""


@pytest.mark.parametrize(
    ("events", "end_s", "edges"),
    [
        ([*NINE_STEPS, *SHORT, (12.1, START, 0)], 130.0, [3, 6, 12]),
        ([(3.0, ITERATION, 7), *LONG], 61.0, [3, 6, 30, 50]),
    ],
)
def test_steps_are_drawn_however_short_their_part_of_the_minute_and_to_the_end_of_a_long_one(
    tmp_path: Path, events: list[tuple[float, int, int]], end_s: float, edges: list[float]
) -> None:
    logs = Logs(tmp_path)
    logs.write("launcher", (1.0, "cycle_started", started(0, 0)), (end_s, "run_ended", {"exit_code": 1}))
    logs.write("monitor", *told(0, 0, 2.0, *sorted(events)))
    assert {*states(only(tmp_path), edges)} == {"step (summed up)"}
