"""The timeouts beside the intervals that they really time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.cli.analysis.intervals import OUT_OF_SECTION
from megatron_ft.cli.render.html_page import page
from megatron_ft.cli.render.report_tables import interval_notes, print_analysis
from tests.support.generated_logs import END, ITERATION, START
from tests.unit.cli.analysis.test_report_cycles import Logs, ended, started
from tests.unit.cli.analysis.test_report_timeline import HUNG, S, iterations, only, progress, row

STEP, SAVE = 0, 1


def write_warm_up(logs: Logs, *events: tuple[float, int, int], attached: bool = True, names: Any = None) -> None:
    """Attached at 2.0 s, set up from 3.0 s to 10.1 s, first iteration at 10.0 s, the first "step" at 60.0 s."""
    setup = [(3.0, START, SAVE), (10.0, ITERATION, 0), (10.1, END, SAVE)]
    t, ev, fields = progress(0, 0, 2.0, *setup, *events)
    logs.write(
        "monitor",
        *([(2.0, "attached", {"rank": 0, "cycle": 0, "pid": 1})] if attached else []),
        (t, ev, {**fields, "names": names or fields["names"]}),
        (t + 1, "timeouts", {"rank": 0, "cycle": 0, "sections": {}, "out_of_section": 20.0}),
    )


def test_a_warm_up_that_is_not_judged_is_left_out(tmp_path: Path) -> None:
    write_warm_up(Logs(tmp_path), *iterations(1, 5, 60.0))
    analysis = only(tmp_path)
    outside = row(analysis, OUT_OF_SECTION)
    assert (outside.count, outside.longest_s) == (1 + 4, 1.0)  # from the attachment to "setup", and between steps
    assert outside.left_out_s == pytest.approx(49.9)
    assert outside.margin == pytest.approx(20.0)
    (note,) = interval_notes(analysis)
    assert "at most 49.90 s" in note
    out = io.StringIO()
    print_analysis(analysis, out)
    assert note in out.getvalue()
    assert "at most 49.90 s" in page(analysis, [])


def test_the_time_before_the_first_iteration_counts(tmp_path: Path) -> None:
    """Here no section is open as the iterations begin; the rest of that time is the warm-up's."""
    logs = Logs(tmp_path)
    begin = [(3.0, START, SAVE), (5.0, END, SAVE), (12.0, ITERATION, 0)]
    logs.write("monitor", progress(0, 0, 2.0, *begin, *iterations(1, 2, 60.0)))
    outside = row(only(tmp_path), OUT_OF_SECTION)
    assert (outside.count, outside.longest_s) == (1 + 1, 7.0)
    assert outside.left_out_s == pytest.approx(48.0)


def test_interval_of_a_cycle_that_ends_in_its_warm_up_is_left_out(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    write_warm_up(logs, (70.0, START, SAVE), (70.5, END, SAVE))
    logs.write("monitor", progress(1, 0, 2.0, *iterations(1, 2, 60.0)))  # it has "step" sections
    outside = row(only(tmp_path), OUT_OF_SECTION)
    assert (outside.longest_s, outside.left_out_s) == (1.0, pytest.approx(59.9))


def test_a_job_without_steps_has_no_warm_up_that_is_known(tmp_path: Path) -> None:
    write_warm_up(Logs(tmp_path), *iterations(1, 3, 60.0), names=["work", "save"])
    outside = row(only(tmp_path), OUT_OF_SECTION)
    assert (outside.longest_s, outside.left_out_s) == (pytest.approx(49.9), None)


@pytest.mark.parametrize("attached", [True, False])
def test_the_time_from_the_attachment_counts_where_it_is_known(tmp_path: Path, attached: bool) -> None:
    write_warm_up(Logs(tmp_path), *iterations(1, 5, 60.0), attached=attached)
    assert row(only(tmp_path), OUT_OF_SECTION).count == 4 + attached


def test_the_time_from_the_attachment_is_unknown_after_a_loss(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    record = progress(0, 0, 2.0, *iterations(1, 5, 60.0), lost=3)
    logs.write("monitor", (2.0, "attached", {"rank": 0, "cycle": 0, "pid": 1}), record)
    assert OUT_OF_SECTION not in [each.name for each in only(tmp_path).intervals]  # "save" may be open all the time


def test_row_after_lost_events_says_on_how_much_of_the_time_it_rests(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    known = [(3.0, START, SAVE), (3.5, END, SAVE), *iterations(1, 7, 4.0)]
    logs.write("monitor", progress(0, 0, 2.0, *known), progress(0, 0, 20.0, *iterations(20, 20, 20.4), lost=5))
    analysis = only(tmp_path)
    outside = row(analysis, OUT_OF_SECTION)
    assert outside.known == pytest.approx(7.6 / 37.0)  # of the 37 s from the first event to the last one
    assert [f"{OUT_OF_SECTION} rests on 21% of the time" in note for note in interval_notes(analysis)] == [True]
    (tmp_path / "whole").mkdir()
    Logs(tmp_path / "whole").write("monitor", progress(0, 0, 2.0, *known))
    analysis = only(tmp_path / "whole")
    assert row(analysis, OUT_OF_SECTION).known == 1
    assert not any("rests on" in note for note in interval_notes(analysis))


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


@pytest.mark.parametrize(("since", "ends"), [(15.5, 15.5), (19.0, 19.0), (9.0, 14.0), (99.0, 20.3)])
def test_goodput_ends_where_the_rank_hung(tmp_path: Path, since: float, ends: float) -> None:
    """All iterations were finished (the next cycle goes on after them); woken to be ended, it closed "step"."""
    logs = Logs(tmp_path)
    verdict = {**HUNG, "rank": 0, "cycle": 0, "since_ns": int(since * S)}
    events = iterations(0, 5, 10.0)[:-1]
    logs.write(
        "launcher",
        (1.0, "cycle_started", started(0, 0)),
        (21.0, "cycle_ended", ended(0, "hang", 0, "rank 0 hung", 4)),
        (22.0, "cycle_started", started(1, 0)),
    )
    logs.write(
        "monitor",
        progress(0, 0, 2.0, *events, (20.3, END, STEP)),
        (20.0, "verdict", {**verdict, "at_ns": 20 * S}),
        (32.0, "first_iteration", {"rank": 0, "cycle": 1, "iteration": 5, "at_ns": 30 * S}),
        progress(0, 1, 29.0, (30.0, ITERATION, 5), (31.0, ITERATION, 6)),
    )
    goodput = only(tmp_path).goodput
    assert goodput is not None
    assert goodput.counted_s == pytest.approx(ends - 10.0 + 1.0)
