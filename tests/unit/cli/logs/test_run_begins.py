"""A launcher that comes after others have written their last: into the same run, or into the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.logs.read import read_newest
from megatron_ft.cli.logs.runs import split_runs
from tests.support.generated_logs import ITERATION
from tests.unit.cli.analysis.test_report_cycles import Logs, ended, started
from tests.unit.cli.analysis.test_report_timeline import progress

HOUR = 3600.0
TRAINS = (1.0, "cycle_started", started(0, 0))
OVER = (9.0, "run_ended", {"exit_code": 0})
ASKED = (8.0, "stop_requested", {"signal": "SIGTERM"})
Record = tuple[float, str, dict[str, Any]]


def meets(how: str = "coordinated", rank: int | None = None) -> Record:
    return (0.1, "meeting", {"how": how, "rank": rank})


def runs(directory: Path) -> list[list[str]]:
    """Of each run, the hosts of its launchers."""
    return [
        [log.host for log in run.files if log.header.role == "launcher"] for run in split_runs(read_newest(directory))
    ]


def write(directory: Path, host: str, *records: Record, opened: float = 0.0) -> None:
    moved = [(at if at >= opened else opened + at, name, fields) for at, name, fields in records]
    Logs(directory, host=host).write("launcher", *moved, opened=opened)


@pytest.mark.parametrize("cycles", [(), (1, 2)])
def test_one_that_comes_while_the_others_train_without_a_word(tmp_path: Path, cycles: tuple[int, ...]) -> None:
    write(tmp_path, "a", meets(), TRAINS)
    write(tmp_path, "b", meets(), *((5 * HOUR, "cycle_started", started(n, 0)) for n in cycles), opened=4 * HOUR)
    assert runs(tmp_path) == [["a", "b"]]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param([meets(), TRAINS, OVER], [meets()], id="it-had-ended"),
        pytest.param([meets(), TRAINS], [meets(), (1.0, "cycle_started", started(0, 0))], id="it-counts-from-0"),
        pytest.param([meets("alone"), TRAINS], [meets("alone")], id="it-is-alone"),
        pytest.param([meets(rank=0), TRAINS], [meets(rank=0)], id="it-has-the-rank-of-the-one-that-was-killed"),
    ],
)
def test_one_that_begins_another_run(tmp_path: Path, first: list[Record], second: list[Record]) -> None:
    write(tmp_path, "a", *first)
    write(tmp_path, "b", *second, opened=60.0)
    assert runs(tmp_path) == [["a"], ["b"]]


def test_a_killed_launcher_does_not_keep_a_run_open_that_has_ended_on_the_others(tmp_path: Path) -> None:
    write(tmp_path, "a", TRAINS, OVER)
    write(tmp_path, "b", TRAINS)
    write(tmp_path, "c", opened=60.0)
    assert runs(tmp_path) == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    "goes_on",
    [[TRAINS], [TRAINS, (9.5, "cycle_ended", ended(0, "crash", 0, "")), (9.6, "cycle_started", started(1, 0))]],
)
def test_one_that_was_asked_to_leave_has_not_ended_the_run(tmp_path: Path, goes_on: list[Record]) -> None:
    write(tmp_path, "a", ASKED, OVER)
    write(tmp_path, "b", *goes_on)
    write(tmp_path, "c", opened=60.0)
    assert runs(tmp_path) == [["a", "b", "c"]]


def test_nor_has_one_that_left_before_the_newest_cycle(tmp_path: Path) -> None:
    write(tmp_path, "a", TRAINS, OVER)
    write(tmp_path, "b", TRAINS, (10.0, "cycle_started", started(1, 0)))
    write(tmp_path, "c", opened=60.0)
    assert runs(tmp_path) == [["a", "b", "c"]]


def test_after_a_long_silence_the_run_was_killed(tmp_path: Path) -> None:
    write(tmp_path, "a", TRAINS)
    write(tmp_path, "b", opened=30 * HOUR)
    assert runs(tmp_path) == [["a"], ["b"]]


@pytest.mark.parametrize(("last_h", "is_same"), [(1.0, False), (4.5, True)])
def test_ranks_that_call_hooks_are_not_silent_for_so_long(tmp_path: Path, last_h: float, is_same: bool) -> None:
    write(tmp_path, "a", TRAINS)
    Logs(tmp_path, host="a").write("monitor", progress(0, 0, last_h * HOUR, (last_h * HOUR, ITERATION, 3)), opened=2.0)
    write(tmp_path, "b", opened=5 * HOUR)
    assert runs(tmp_path) == ([["a", "b"]] if is_same else [["a"], ["b"]])
