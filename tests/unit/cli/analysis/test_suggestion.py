"""Timeouts suggested from the intervals that event logs hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_ft.cli.main import main
from tests.support.generated_logs import END, START
from tests.unit.cli.analysis.test_report_cycles import Logs
from tests.unit.cli.analysis.test_report_timeline import told

STEP, SAVE = 0, 1


def write_steps(directory: Path, of_ranks: list[list[float]]) -> None:
    """Ranks with steps of these lengths, one after the other, 10 ms apart, and then a few saves of 0.1 s."""
    records = []
    for rank, lengths_s in enumerate(of_ranks):
        events: list[tuple[float, int, int]] = []
        at = 3.0
        for length_s, section in [*((each, STEP) for each in lengths_s), *[(0.1, SAVE)] * 3]:
            events += [(at, START, section), (at + length_s, END, section)]
            at += length_s + 0.01
        records += [(2.0, "attached", {"rank": rank, "cycle": 0, "pid": rank + 1})]
        records += told(rank, 0, 2.0, *events, names=("step", "checkpointing"))
    Logs(directory).write("monitor", *records)


def suggested(capsys: pytest.CaptureFixture[str], *directories: Path) -> tuple[int, str]:
    code = main(["report", *map(str, directories), "--suggest-timeouts"])
    return code, capsys.readouterr().out


def test_suggestion_is_yaml_with_rule_and_number_of_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(tmp_path, [[1.0] * 120, [1.0] * 60 + [14.1] + [1.0] * 40])
    code, out = suggested(capsys, tmp_path)
    assert code == 0
    assert yaml.safe_load(out) == {
        "fault_tolerance": {"rank_section_timeouts": {"step": 71}, "rank_out_of_section_timeout": 60}
    }
    (step,) = [line for line in out.splitlines() if "step:" in line]
    assert step.endswith("# 5 x the longest interval of any rank, at least 60 s; the longest of 120 took 14.1 s")
    (save,) = [line for line in out.splitlines() if "checkpointing" in line]
    assert save.startswith("# checkpointing: no value: 3 intervals")


def test_intervals_of_many_ranks_make_no_value_from_one_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(tmp_path, [[2.0]] * 128)
    code, out = suggested(capsys, tmp_path)
    assert code == 1
    assert yaml.safe_load(out) is None
    assert "# step: no value: 1 interval observed" in out


def test_intervals_of_several_runs_count_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_steps(tmp_path / name, [[1.0] * 60])
    assert suggested(capsys, tmp_path / "one")[0] == 1
    code, out = suggested(capsys, tmp_path / "one", tmp_path / "two")
    assert code == 0
    assert "    step: 60  #" in out
