"""The timeouts beside the intervals that they really time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.generated_logs import END, START
from tests.unit.cli.analysis.test_report_cycles import Logs
from tests.unit.cli.analysis.test_report_timeline import only, row, told

STEP, SAVE = 0, 1


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
