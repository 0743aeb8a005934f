"""The timeouts beside the intervals that they really time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.analysis.analysis import Analysis
from megatron_ft.cli.analysis.interval_lengths import OUT_OF_SECTION
from megatron_ft.cli.render.html_page import page
from megatron_ft.cli.render.report_tables import print_report, sheets
from tests.support.generated_logs import END, ITERATION, START
from tests.unit.cli.analysis.test_report_cycles import Logs, started
from tests.unit.cli.analysis.test_report_timeline import iterations, only, row, told

STEP, SAVE = 0, 1


def notes_of(analysis: Analysis) -> list[str]:
    return [note for sheet in sheets(analysis) for note in sheet.notes]


def test_first_times_out_of_section_of_a_cycle_are_left_out(tmp_path: Path) -> None:
    """Attached at 2.0 s, set up from 3.0 s to 10.1 s, and the first "step" at 50.0 s: a warm-up."""
    setup = [(3.0, START, SAVE), (10.0, ITERATION, 0), (10.1, END, SAVE)]
    timeouts = (70.0, "timeouts", {"rank": 0, "cycle": 0, "sections": {}, "out_of_section": 20.0})
    Logs(tmp_path).write("monitor", *told(0, 0, 2.0, *setup, *iterations(1, 8, 50.0)), timeouts)
    analysis = only(tmp_path)
    outside = row(analysis, OUT_OF_SECTION)
    assert (outside.count, outside.left_out_s) == (1 + 1 + 7, pytest.approx(39.9))
    assert outside.longest_s == pytest.approx(0.42, abs=0.021)  # the end of its bucket
    assert outside.margin == pytest.approx(20.0 / outside.longest_s)
    (note,) = [each for each in notes_of(analysis) if OUT_OF_SECTION in each]
    assert "at most 39.90 s" in note
    out = io.StringIO()
    print_report(analysis, out)
    assert note in out.getvalue()
    assert "at most 39.90 s" in page(analysis, [])


def test_few_intervals_are_known_exactly_and_many_to_twelve_percent(tmp_path: Path) -> None:
    lengths_s = [0.1 * number for number in range(1, 41)]
    steps = [
        (at, kind, STEP)
        for number, s in enumerate(lengths_s)
        for at, kind in ((5 * number + 1, START), (5 * number + 1 + s, END))
    ]
    saves = [(5.0 * number + 0.5, kind, SAVE) for number in (1, 9, 30) for kind in (START, END)]
    saves = [(at + (0.125 if kind == END else 0), kind, what) for at, kind, what in saves]
    Logs(tmp_path).write("monitor", *told(0, 0, 1.0, *sorted(steps + saves)))
    analysis = only(tmp_path)
    step, save = row(analysis, "step"), row(analysis, "save")
    assert (step.count, save.count) == (40, 3)
    assert step.longest_s == pytest.approx(4.0)
    assert step.quantile(0.5) == pytest.approx(2.0, rel=0.12)
    assert (save.longest_s, save.quantile(0.5)) == (0.125, 0.125)


def test_timeout_in_force_is_the_least_of_the_last_cycle(tmp_path: Path) -> None:
    """Rank 1 was there in cycle 0 only; the smaller timeouts were those before the learned ones."""

    def timeouts(rank: int, cycle: int, step: float) -> tuple[float, str, dict[str, Any]]:
        return (2.0 + cycle, "timeouts", {"rank": rank, "cycle": cycle, "sections": {"step": step}})

    logs = Logs(tmp_path)
    logs.write("monitor", timeouts(0, 0, 5.0), timeouts(0, 1, 60.0))
    logs.write("monitor", timeouts(1, 0, 5.0))
    logs.write("monitor", timeouts(2, 1, 50.0), (9.0, "timeouts", {"rank": 3, "sections": {"step": 1.0}}))
    logs.write("launcher", (8.0, "cycle_started", started(2, 0)))  # of which no timeouts are known yet
    assert row(only(tmp_path), "step").timeout_s == 50.0
