"""Which logs are of one run: the clocks of its nodes, and launchers that come later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.analysis.timeline import FIRST_NS
from megatron_ft.cli.logs.read import read_directory
from megatron_ft.cli.logs.runs import Run, split_runs
from megatron_ft.link.facts.launcher import CycleStarted
from tests.support.generated_logs import END, ITERATION, START
from tests.unit.cli.analysis.test_report_cycles import DAWN, Logs, ended, first_iteration, started
from tests.unit.cli.analysis.test_report_timeline import S, only, told

TRAINS = (1.0, "cycle_started", started(0, 0))
OVER = (9.0, "run_ended", {"exit_code": 0})
ASKED = (8.0, "stop_requested", {"signal": "SIGTERM"})
Record = tuple[float, str, dict[str, Any]]


def run_of(directory: Path) -> Run:
    (run,) = split_runs(read_directory(directory))
    return run


def write_two_nodes(directory: Path, *, shift: float, second_host: str = "node-a") -> None:
    """Each has one rank; the second node's monotonic clock began ``shift`` seconds earlier. All else is the same."""
    begin = int(shift * S)
    for number, (host, offset) in enumerate((("node-a", DAWN), (second_host, DAWN - begin))):
        logs = Logs(directory, host=host, wall_offset=offset)
        at = shift * number
        steps = [(at + 3.0, ITERATION, 0), (at + 3.0, START, 0), (at + 3.5, END, 0), (at + 4.0, START, 0)]
        logs.write(
            "launcher" if number == 0 else "launcher2",
            (at + 1.0, "cycle_started", started(0, 0, 1)),
            (at + 9.0 + number, "cycle_ended", ended(0, "crash", 0, "rank 0 exited with code 1", 3)),
            opened=at,
        )
        logs.write(
            "monitor",
            (at + 2.0, "attached", {"rank": number, "cycle": 0, "pid": 1}),
            (at + 3.1, "first_iteration", first_iteration(number, 0, 0, at + 3.0)),
            *told(number, 0, at + 2.0, *steps),
            opened=at + 1.5,
        )


@pytest.mark.parametrize("second_host", ["node-a", "node-b"])
@pytest.mark.parametrize("shift", [5000.0, 61.0])
def test_nodes_of_the_same_name_have_clocks_of_their_own(tmp_path: Path, shift: float, second_host: str) -> None:
    """Containers, say: all of them are called the same."""
    write_two_nodes(tmp_path, shift=shift, second_host=second_host)
    run = run_of(tmp_path)
    assert len(set(run.offsets_ns)) == 2
    analysis = only(tmp_path)
    tracks = analysis.timeline.tracks
    assert [track.host for track in tracks] == ["node-a", second_host]
    assert [track.minutes[0, FIRST_NS] for track in tracks] == [DAWN + 3 * S] * 2
    assert [track.begin_ns for track in tracks] == [DAWN + 1 * S] * 2
    assert {each.at_ns for each in run.records if isinstance(each.record, CycleStarted)} == {DAWN + 1 * S}


def test_a_host_that_was_started_again_has_another_clock(tmp_path: Path) -> None:
    """Its monotonic clock begins from zero."""
    Logs(tmp_path).write("launcher", (1000.0, "cycle_started", started(0, 0)), opened=999.0)
    again = Logs(tmp_path, wall_offset=DAWN + 1300 * S)
    again.write("launcher", (1.0, "cycle_started", started(1, 0)), opened=0.5)
    again.write("monitor", (2.0, "attached", {"rank": 0, "cycle": 1, "pid": 1}), opened=1.0)
    records = [pair for run in split_runs(read_directory(tmp_path)) for pair in run.records]
    assert [(each.at_ns - DAWN) / S for each in records] == [1000.0, 1301.0, 1302.0]


def meets(how: str = "coordinated", rank: int | None = None) -> Record:
    return (0.1, "meeting", {"how": how, "rank": rank})


def runs(directory: Path) -> list[list[str]]:
    """Of each run, the hosts of its launchers."""
    return [
        [log.host for log in run.files if log.header.role == "launcher"]
        for run in split_runs(read_directory(directory))
    ]


def write(directory: Path, host: str, *records: Record, opened: float = 0.0) -> None:
    moved = [(at if at >= opened else opened + at, name, fields) for at, name, fields in records]
    Logs(directory, host=host).write("launcher", *moved, opened=opened)


@pytest.mark.parametrize(
    ("first", "second", "opened"),
    [
        pytest.param([meets(), TRAINS, OVER], [meets()], 60.0, id="it-had-ended"),
        pytest.param([meets(), TRAINS], [meets(), TRAINS], 60.0, id="it-counts-from-0"),
        pytest.param([meets("alone"), TRAINS], [meets("alone")], 60.0, id="it-is-alone"),
        pytest.param([meets(rank=0), TRAINS], [meets(rank=0)], 60.0, id="it-has-the-rank-of-the-one-that-was-killed"),
    ],
)
def test_late_launcher_begins_another_run_where_the_first_has_ended_or_had_its_place(
    tmp_path: Path, first: list[Record], second: list[Record], opened: float
) -> None:
    write(tmp_path, "a", *first)
    write(tmp_path, "b", *second, opened=opened)
    assert runs(tmp_path) == [["a"], ["b"]]


FAILED = (9.5, "cycle_ended", ended(0, "crash", 0, ""))


@pytest.mark.parametrize(
    ("first", "second", "is_open"),
    [
        pytest.param([TRAINS, OVER], [TRAINS], False, id="the-other-was-killed"),
        pytest.param([ASKED, OVER], [TRAINS], True, id="it-was-asked-to-leave"),
        pytest.param(
            [ASKED, OVER], [TRAINS, FAILED, (9.6, "cycle_started", started(1, 0))], True, id="the-other-restarts"
        ),
        pytest.param([TRAINS, OVER], [TRAINS, (10.0, "cycle_started", started(1, 0))], True, id="it-left-before"),
    ],
)
def test_run_is_open_after_the_end_of_a_launcher_if_another_trains_on(
    tmp_path: Path, first: list[Record], second: list[Record], is_open: bool
) -> None:
    write(tmp_path, "a", *first)
    write(tmp_path, "b", *second)
    write(tmp_path, "c", opened=60.0)
    assert runs(tmp_path) == ([["a", "b", "c"]] if is_open else [["a", "b"], ["c"]])


def test_record_of_0_1_0_on_silent_collectives_is_a_reported_hang(tmp_path: Path) -> None:
    silent = {"cycle": 0, "rank": 1, "elapsed_s": 5.0, "timeout_s": 4.0, "text": "rank 1 in a.py:1 f"}
    told_of = [(10.0, "no_collective", silent), (20.0, "no_collective", {**silent, "cycle": 1, "ends": True})]
    Logs(tmp_path).write("launcher", TRAINS, *told_of)
    (hang,) = run_of(tmp_path).accounting.hangs
    assert (hang.section, hang.rank, hang.cycle, hang.after_s) == ("collectives", 1, 0, 5.0)
