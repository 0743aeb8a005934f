"""What the bench makes of its stamps and figures; it measures nothing here."""

from __future__ import annotations

import pytest

from tests.bench import restarts
from tests.bench.stamps import Stamp, phases


def life(rank: int, pid: int, began: float, *, until: str = "step") -> list[Stamp]:
    """One process that takes a second for each phase, and does two steps."""
    events = ["user", "imported", "group", "step"]
    reached = events[: events.index(until) + 1]
    stamps = [Stamp(rank, pid, event, 1, began + i) for i, event in enumerate(reached)]
    return [*stamps, Stamp(rank, pid, "step", 2, began + 4)] if until == "step" else stamps


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
