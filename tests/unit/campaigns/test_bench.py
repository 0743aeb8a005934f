"""What the bench makes of its stamps and figures; it measures nothing here."""

from __future__ import annotations

import pytest

from tests.bench import jobs, restarts
from tests.bench.figures import Row, compare, median, middle, percentile
from tests.bench.stamps import Stamp, last_pids, parse, phases, steps_done


def life(rank: int, pid: int, began: float, *, until: str = "step") -> list[Stamp]:
    """One process that takes a second for each phase, and does two steps."""
    events = ["user", "imported", "group", "step"]
    reached = events[: events.index(until) + 1]
    stamps = [Stamp(rank, pid, event, 1, began + i) for i, event in enumerate(reached)]
    return [*stamps, Stamp(rank, pid, "step", 2, began + 4)] if until == "step" else stamps


def test_stamps_are_parsed() -> None:
    assert parse("1 77 step 3 2500000000\n0 78 user 0 1000000000\n") == [
        Stamp(1, 77, "step", 3, 2.5),
        Stamp(0, 78, "user", 0, 1.0),
    ]


def test_a_line_that_is_being_written_is_no_stamp_yet() -> None:
    assert parse("1 77 step 3 2500000000\n0 78 us") == [Stamp(1, 77, "step", 3, 2.5)]
    assert parse("") == []


def test_a_phase_is_over_when_the_last_rank_has_passed_it() -> None:
    stamps = [*life(0, 10, 100.0), *life(1, 11, 100.5)]
    assert phases(stamps, 99.0, 2) == {"user": 1.5, "imported": 2.5, "group": 3.5, "step": 4.5}


def test_a_restart_is_measured_in_the_new_processes_alone() -> None:
    old = [*life(0, 10, 100.0), *life(1, 11, 100.0)]
    new = [*life(0, 20, 201.0), *life(1, 21, 201.0)]
    assert phases(old, 200.0, 2) is None
    assert phases([*old, *new[:-1]], 200.0, 2) == {"user": 1.0, "imported": 2.0, "group": 3.0, "step": 4.0}


def test_an_attempt_without_a_step_is_none() -> None:
    failed = [*life(0, 20, 201.0, until="group"), *life(1, 21, 201.0, until="user")]
    second = [*life(0, 30, 211.0), *life(1, 31, 211.0)]
    assert phases(failed, 200.0, 2) is None
    assert phases([*failed, *life(0, 30, 211.0)], 200.0, 2) is None
    found = phases([*failed, *second], 200.0, 2)
    assert found is not None
    assert found["user"] == 11.0


def test_steps_are_counted_for_the_latest_processes() -> None:
    stamps = [*life(0, 10, 1.0), *life(1, 11, 1.0), *life(1, 21, 10.0, until="user")]
    assert last_pids(stamps) == {0: 10, 1: 21}
    assert steps_done(stamps, {0: 10, 1: 11}) == 2
    assert steps_done(stamps, last_pids(stamps)) == 0
    assert steps_done([], {}) == 0


def test_medians_leave_out_what_is_missing() -> None:
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None]) is None
    runs = [{"a": 1.0, "b": {"c": 10.0}}, None, {"a": 3.0, "b": {"c": 30.0}}]
    assert middle(runs) == {"a": 2.0, "b": {"c": 20.0}}
    assert middle([None]) == {}


def test_percentile_takes_the_nearest_value() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 0.5) == 51.0
    assert percentile(values, 0.99) == 100.0
    assert percentile([7.0], 0.99) == 7.0


def test_a_ratio_says_how_many_times_better_ours_is() -> None:
    assert Row("time", "s", 0.5, {"torchrun": 2.0}).ratio("torchrun") == 4.0
    assert Row("goodput", "%", 90.0, {"torchrun": 60.0}, more_is_better=True).ratio("torchrun") == 1.5
    assert Row("count", "of 7", 7, {"torchrun": 3}, is_compared=False).ratio("torchrun") is None


def test_a_row_without_a_figure_shows_dashes() -> None:
    row = compare("time", "s", {"ours": 0.5, "torchrun": None})
    assert row.cells() == ["time", "0.5 s", "-", "-", "-", "-"]
    assert compare("time", "s", {"torchrun": 2.0}).cells() == ["time", "-", "2 s", "-", "-", "-"]
    assert compare("time", "s", {"ours": 0.5, "torchrun": 2.0}).cells()[2:4] == ["2 s", "4.00x"]


@pytest.mark.parametrize("recovered", [0, 2])
def test_restarts_make_rows_even_if_nothing_recovered(recovered: int) -> None:
    times = {"user": 0.1, "imported": 0.2, "group": 0.3, "step": 0.4}
    memory = {"rank_mib": 50.0, "job_mib": 200.0}
    good = {"launch": times, "restart": times, "before": memory, "after": memory}
    bad = {"launch": times, "restart": None, "before": memory, "after": None}
    theirs = restarts.summary([good] * recovered + [bad] * (2 - recovered))
    result = {name: {"ours": restarts.summary([good, good]), "torchrun": theirs} for name in restarts.ALL}
    plain = restarts.summary([bad])
    four = {"ours": {**memory, "launch": 0.4}, "torchrun": None}
    found = restarts.rows({**result, "plain_torchrun": plain, "four_ranks": four, "four_megatron": four})
    shown = {row.what: row.cells() for row in found}
    assert shown["recovered, bare script"][1:3] == ["2 of 2", f"{recovered} of 2"]
    assert shown["kill to first step, bare script"][1:4] == ["0.4 s", *(["0.4 s", "1.00x"] if recovered else ["-"] * 2)]
    assert shown["launch to first step, bare script"][1:4] == ["0.4 s", "0.4 s", "1.00x"]


def test_runs_are_interleaved_and_fewer_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(jobs.time, "monotonic", lambda: clock[0])
    made = []
    for run, launcher in jobs.interleaved(7, ["ours", "torchrun"], budget_s=65.0):
        made.append((run, launcher))
        clock[0] += 10.0
    assert made == [(run, launcher) for run in range(3) for launcher in ("ours", "torchrun")]
    assert len(list(jobs.interleaved(7, ["ours", "torchrun"]))) == 14
