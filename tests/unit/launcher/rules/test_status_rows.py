"""From boards and facts to rows: what is open, how much of which timeout is used, and in what state a rank is."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ft.launcher.rules.status_rows import RankReading
from megatron_ft.link.base.layout import BoardSnapshot, SectionView
from megatron_ft.link.messages.job_facts import RankRow, RankState, TimeoutUse
from megatron_ft.monitor.rules.hang_detector import HangDetector
from tests.support.status_facts import NOW, S, job_facts, rank_facts, snapshot


def row_of(
    board: BoardSnapshot | None, *, job: dict[str, Any] | None = None, rank: RankRow | None = None, **reading: Any
) -> RankRow:
    facts = job_facts(rank or rank_facts(), readings={1: RankReading(board, **reading)}, **(job or {}))
    (row,) = facts.ranks
    return row


def test_the_most_advanced_of_all_open_sections_counts_and_without_one_the_time_out_of_sections() -> None:
    sections = (SectionView("step", NOW - 4 * S, 3, 10 * S), SectionView("save", NOW - 12 * S, 1, 40 * S))
    row = row_of(snapshot(sections=sections))
    assert [(s.name, s.open_s, s.timeout_s) for s in row.sections] == [("save", 12.0, 40.0), ("step", 4.0, 10.0)]
    assert row.timeout == TimeoutUse("section", "step", 4.0, 10.0)
    assert row.timeout.share == pytest.approx(0.4)
    assert (row.state, row.iteration, row.out_of_section_s) == (RankState.RUNNING, 12, None)
    row = row_of(snapshot())  # out of sections
    assert (row.sections, row.out_of_section_s) == ((), 1.0)
    assert row.timeout == TimeoutUse("out_of_section", None, 1.0, 8.0)


def test_heartbeats_that_were_sent_count_beside_sections_and_awaited_ones_do_not() -> None:
    sections = (SectionView("step", NOW - S, 3, 10 * S),)
    beats = {"heartbeats": 0, "own_initial_heartbeat_timeout_ns": 101 * S}
    awaited = row_of(snapshot(sections=sections, **beats))
    assert awaited.timeout is not None
    assert awaited.timeout.kind == "section"
    beats = {"heartbeats": 4, "last_heartbeat_ns": NOW - 30 * S, "own_heartbeat_timeout_ns": 40 * S}
    row = row_of(snapshot(sections=sections, **beats))
    assert row.timeout == TimeoutUse("heartbeat", None, 30.0, 40.0)
    assert row.heartbeat_s == 30.0


@pytest.mark.parametrize("elapsed_s", [1, 9, 10, 11])
def test_the_share_is_one_when_the_monitor_finds_it_hung(elapsed_s: int) -> None:
    board = snapshot(sections=(SectionView("step", NOW - elapsed_s * S, 3, 10 * S),))
    row = row_of(board)
    assert row.timeout is not None
    watching = HangDetector(check_interval_ns=S, last_look_ns=NOW)
    watching.check(board, NOW)
    assert (row.timeout.share >= 1) == (watching.suspect is not None)


def test_pauses_count_for_nobody() -> None:
    board = snapshot(sections=(SectionView("step", NOW - 9 * S, 3, 10 * S),))
    pauses = ((NOW - 20 * S, NOW - 8 * S), (NOW - 3 * S, NOW - S))
    row = row_of(board, job={"pauses": pauses})
    assert row.timeout is not None
    assert (row.timeout.used_s, row.state) == (6.0, RankState.RUNNING)
    assert row.sections[0].open_s == 9.0
    # the pause that lasts goes on after the launcher has told of it
    row = row_of(board, job={"pauses": (*pauses[:1], (NOW - 3 * S, None))})
    assert row.timeout is not None
    assert (row.timeout.used_s, row.state) == (5.0, RankState.PAUSED)


@pytest.mark.parametrize(
    ("board", "rank", "reading", "state"),
    [
        (None, {}, {}, RankState.NOT_ATTACHED),
        (snapshot(closing=True), {}, {}, RankState.CLOSING),
        (None, {}, {"damaged": True}, RankState.DAMAGED),
        (snapshot(), {}, {"process_state": "T"}, RankState.STOPPED),
        (snapshot(), {}, {"process_state": None}, RankState.EXITED),
        (snapshot(), {"exit_code": 0}, {}, RankState.EXITED),
        (snapshot(), {"state": RankState.HUNG}, {"process_state": "T"}, RankState.HUNG),
    ],
)
def test_state_of_a_rank_follows_from_board_process_and_verdict(
    board: BoardSnapshot | None, rank: dict[str, Any], reading: dict[str, Any], state: RankState
) -> None:
    row = row_of(board, rank=rank_facts(**rank), **reading)
    assert row.state is state
    if state in (RankState.EXITED, RankState.CLOSING, RankState.DAMAGED, RankState.NOT_ATTACHED):
        assert (row.timeout, row.sections, row.out_of_section_s) == (None, (), None)
