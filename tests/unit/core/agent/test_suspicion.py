"""A learned timeout is over: all ranks are looked at twice before any of them is ended."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.core.agent import edge
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.edge import Say
from megatron_ft.core.messages.monitor import CheckProgress, ConfirmHang, ExtendTimeout
from tests.support.agents import Driven, attached, checked, hung, suspected

SLOW = hung(elapsed_s=10.0, timeout_s=10.0, at_ns=10**12, learned=True)
BOUND_S = 1.9


def running(ranks: int = 2, *, nodes: int = 1, **options: object) -> Driven:
    driven = Driven(**{"max_restarts": 3, "max_nodes": nodes, **options})
    driven.run(ranks, nodes=nodes)
    for local_rank in range(ranks):
        driven.hear(attached(local_rank, 0, driven.now_ns))
    driven.done.clear()
    return driven


def suspect(driven: Driven, local_rank: int = 0, **more: object) -> list[edge.Effect]:
    verdict = replace(SLOW, local_rank=local_rank, rank=10 * local_rank, **more)  # type: ignore[arg-type]
    return driven.hear(suspected(local_rank, 0, verdict))


def kinds(effects: list[edge.Effect]) -> list[type]:
    return [type(each.order if isinstance(each, edge.OrderMonitor) else each) for each in effects]


def looked(driven: Driven, local_rank: int, progress: str = "") -> list[edge.Effect]:
    return driven.hear(checked(local_rank, 0, progress))


def test_suspect_makes_the_node_check_all_its_ranks_once() -> None:
    driven = running(3)
    effects = suspect(driven)
    assert effects == [
        edge.OrderMonitor(local_rank, CheckProgress(0, driven.now_ns + 1_000_000_000)) for local_rank in range(3)
    ]
    assert suspect(driven, 1) == []  # that look counts for this one, too


def test_short_timeouts_are_decided_sooner() -> None:
    driven = running(1)
    (look,) = suspect(driven, elapsed_s=0.5, timeout_s=0.5)
    assert isinstance(look, edge.OrderMonitor)
    assert isinstance(look.order, CheckProgress)
    assert look.order.again_ns - driven.now_ns == 100_000_000


def test_suspects_are_confirmed_together_where_no_rank_moves() -> None:
    driven = running(3)
    suspect(driven)
    suspect(driven, 2)
    assert looked(driven, 0) == looked(driven, 1) == []
    assert looked(driven, 2) == [edge.OrderMonitor(0, ConfirmHang(0)), edge.OrderMonitor(2, ConfirmHang(0))]
    assert driven.said == []


def test_suspects_get_more_time_in_one_line_where_a_rank_moves() -> None:
    driven = running(3)
    suspect(driven)
    suspect(driven, 2)
    looked(driven, 0)
    looked(driven, 1, "has read or written 12.0 MB")
    assert driven.orders(ExtendTimeout) == [
        edge.OrderMonitor(0, ExtendTimeout(0, 12.5)),
        edge.OrderMonitor(2, ExtendTimeout(0, 12.5)),
    ]
    (line,) = driven.said
    assert line == (
        "rank 0 (and 1 other rank of this node): in 'step' for 10.0 s after iteration 7, longer than its learned "
        "timeout of 10.0 s, but rank 10 has read or written 12.0 MB: extending the timeout, to at most 40.0 s in total"
    )
    assert driven.written == ["more_time", "more_time"]
    assert looked(driven, 2) == []  # an answer that nobody waits for any more
    assert driven.wait(10) == []


def test_the_line_is_said_once_for_each_interval() -> None:
    driven = running(1)
    for elapsed_s in (10.0, 12.5, 15.7):
        suspect(driven, elapsed_s=elapsed_s)
        looked(driven, 0, "has completed 2 collectives")
    assert len(driven.said) == 1
    assert len(driven.written) == 3
    suspect(driven, iteration=8)
    looked(driven, 0, "has completed 2 collectives")
    assert len(driven.said) == 2


@pytest.mark.parametrize(("limits", "limit_s"), [({}, 40.0), ({"limit_s": 240.0}, 240.0)])
def test_extensions_end_at_four_timeouts_or_the_limit_of_the_interval_whoever_moves(
    limits: dict[str, object], limit_s: float
) -> None:
    driven = running(1)
    suspect(driven, elapsed_s=limit_s - 1.0, **limits)
    looked(driven, 0, "computes in train.py:9 step")
    assert driven.orders(ExtendTimeout) == [edge.OrderMonitor(0, ExtendTimeout(0, limit_s))]
    assert driven.said[0].endswith(f"extending the timeout, to at most {limit_s} s in total")
    driven.done.clear()
    assert kinds(suspect(driven, elapsed_s=limit_s + 0.01, **limits)) == [Say, ConfirmHang]
    words = f"its timeout is extended to at most {limit_s} s, terminating it although ranks make progress"
    assert words in driven.said[0]


def test_hang_under_observe_only_is_confirmed_without_a_line() -> None:
    driven = running(1, observe_only=True)
    assert suspect(driven, elapsed_s=40.01) == [edge.OrderMonitor(0, ConfirmHang(0))]
    suspect(driven)
    assert looked(driven, 0) == [edge.OrderMonitor(0, ConfirmHang(0))]


def test_a_monitor_that_says_nothing_is_waited_for_within_the_bound() -> None:
    driven = running(2)
    suspect(driven)
    looked(driven, 0)
    assert driven.wait(BOUND_S - 0.01) == []
    assert driven.wait(0.02) == [edge.OrderMonitor(0, ConfirmHang(0))]


def test_ranks_that_have_ended_or_never_connected_are_not_looked_at() -> None:
    driven = Driven(max_restarts=3)
    driven.run(3)
    driven.hear(attached(0, 0, driven.now_ns), attached(1, 0, driven.now_ns))
    driven.exits(1)
    driven.done.clear()
    suspect(driven)
    assert [look.local_rank for look in driven.orders(CheckProgress)] == [0]


def test_suspicion_is_not_decided_once_the_cycle_ends() -> None:
    driven = running(2, nodes=2)
    suspect(driven)
    driven.ends()
    driven.done.clear()
    looked(driven, 0)
    looked(driven, 1)
    suspect(driven, 1)
    assert driven.orders(ConfirmHang) == driven.orders(ExtendTimeout) == driven.orders(CheckProgress) == []


def test_the_other_nodes_are_asked_and_waited_for() -> None:
    driven = running(1, nodes=2)
    suspect(driven)
    assert driven.told == [m.Suspected(0, 1.0)]
    assert looked(driven, 0) == []
    assert driven.wait(BOUND_S - 0.01) == []
    driven.hear(m.RankProgressing(0, "rank 9 has begun an iteration"))
    assert driven.orders(ExtendTimeout) == [edge.OrderMonitor(0, ExtendTimeout(0, 12.5))]
    assert driven.wait(5) == []


def test_suspect_is_confirmed_at_the_bound_where_no_node_tells_of_progress() -> None:
    driven = running(1, nodes=2)
    suspect(driven)
    looked(driven, 0)
    assert driven.wait(BOUND_S + 0.01) == [edge.OrderMonitor(0, ConfirmHang(0))]


def test_recent_progress_on_another_node_extends_the_timeout_once() -> None:
    driven = running(1, nodes=2)
    driven.hear(m.RankProgressing(0, "rank 9 has begun an iteration"))
    driven.wait(1.5)
    suspect(driven)
    assert driven.orders(ExtendTimeout) == [edge.OrderMonitor(0, ExtendTimeout(0, 12.5))]
    driven.done.clear()
    driven.wait(3)
    suspect(driven, elapsed_s=12.5)
    assert driven.orders(ExtendTimeout) == []
    assert driven.orders(CheckProgress)


def test_a_node_that_is_asked_tells_of_progress_and_of_nothing_else() -> None:
    driven = running(2, nodes=2)
    driven.hear(m.Suspected(0, 0.5))
    orders = [each.order for each in driven.orders(CheckProgress) if isinstance(each.order, CheckProgress)]
    assert [order.again_ns - driven.now_ns for order in orders] == [500_000_000] * 2
    looked(driven, 0)
    looked(driven, 1, "has completed 2 collectives")
    assert driven.told == [m.RankProgressing(0, "rank 10 has completed 2 collectives")]
    driven.done.clear()
    driven.hear(m.Suspected(0, 0.5))
    looked(driven, 0)
    looked(driven, 1)
    assert driven.wait(3) == []
    assert driven.told == []


def test_nodes_that_decide_for_themselves_ask_nobody() -> None:
    driven = running(1, nodes=2, min_healthy=True)
    suspect(driven)
    assert driven.told == []
    (asked,) = looked(driven, 0)
    assert isinstance(asked, m.Hang)  # for a review of all ranks


def test_a_rank_that_stands_still_is_confirmed_long_before_its_limit() -> None:
    driven = running(1)
    suspect(driven, limit_s=240.0)
    assert looked(driven, 0) == [edge.OrderMonitor(0, ConfirmHang(0))]


def test_a_rank_that_is_only_reported_is_checked_and_confirmed_without_a_line() -> None:
    driven = running(2)
    assert kinds(suspect(driven, enforced=False)) == [CheckProgress, CheckProgress]
    looked(driven, 0)
    looked(driven, 1, "has completed 2 collectives")
    assert driven.orders(ExtendTimeout) == [edge.OrderMonitor(0, ExtendTimeout(0, 12.5))]
    assert (driven.said, driven.written) == ([], ["more_time"])
    driven.done.clear()
    suspect(driven, enforced=False, elapsed_s=12.5)
    looked(driven, 0)
    assert looked(driven, 1) == [edge.OrderMonitor(0, ConfirmHang(0))]
    driven.done.clear()
    assert suspect(driven, enforced=False, elapsed_s=40.01) == [edge.OrderMonitor(0, ConfirmHang(0))]


def test_hang_waits_for_the_longest_explained_interval_if_no_node_can_be_asked() -> None:
    """And a quarter more; the limit is four times the longest."""
    driven = running(1, nodes=2, min_healthy=True)
    suspect(driven, limit_s=240.0)
    assert looked(driven, 0) == [edge.OrderMonitor(0, ExtendTimeout(0, 75.0))]
    assert driven.said == []
    driven.done.clear()
    suspect(driven, elapsed_s=75.0, limit_s=240.0)
    assert [type(each) for each in looked(driven, 0)] == [m.Hang]  # a review, before any hang is confirmed


def test_progress_on_this_node_counts_if_other_nodes_cannot_be_asked() -> None:
    driven = running(1, nodes=2, min_healthy=True)
    suspect(driven, limit_s=240.0)
    looked(driven, 0, "has begun an iteration")
    assert driven.orders(ExtendTimeout) == [edge.OrderMonitor(0, ExtendTimeout(0, 12.5))]
