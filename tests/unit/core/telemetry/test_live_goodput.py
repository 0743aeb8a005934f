"""Goodput of a job that still runs."""

from __future__ import annotations

import pytest

from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.facts.launcher import Cause, CauseKind, CycleEnded, CycleStarted, RankExited, RankStarted
from megatron_ft.core.goodput.classify import TimeClass
from megatron_ft.core.telemetry.live_goodput import LiveGoodput
from tests.support.status_facts import snapshot

S = 1_000_000_000


def training(cycle: int, *, first: int, at_s: int, iteration: int) -> BoardSnapshot:
    return snapshot(rank=0, cycle=cycle)._replace(
        first_iteration=first, first_iteration_at_ns=at_s * S, iteration=iteration, last_transition_ns=at_s * S + 1
    )


def started(cycle: int, at_s: int) -> CycleStarted:
    ranks = (RankStarted(rank=0, local_rank=0, pid=1, at_ns=at_s * S),)
    return CycleStarted(cycle=cycle, ranks=ranks, met_ns=at_s * S, spawned_ns=at_s * S)


def test_iterations_done_again_after_a_restart_are_redone() -> None:
    live = LiveGoodput(100 * S)
    live.hear(started(0, 100), 100 * S)
    live.look([training(0, first=0, at_s=100, iteration=10)])
    live.hear(RankExited(rank=0, cycle=0, exitcode=3, iteration=10, at_ns=200 * S), 200 * S)
    live.hear(CycleEnded(cycle=0, outcome="failed", cause=Cause(kind=CauseKind.CRASH), iteration=10), 201 * S)
    live.hear(started(1, 203), 203 * S)
    boards = [training(1, first=6, at_s=210, iteration=8)]
    live.look(boards)
    live.look(boards)
    found = live.ask(boards, 230 * S)()
    assert found is not None
    assert found.redone == 4
    assert found.seconds[TimeClass.RESTART] + found.seconds[TimeClass.WAITING] == 10.0
    assert sum(found.seconds.values()) == pytest.approx(130.0)
