"""The last look before a rank is terminated: a node's part, and the coordinator's."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Hang, Reviewed
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.launcher.rules import events
from megatron_ft.link.messages.monitor_messages import Collect, ExtendTimeout, Release
from tests.fuzz.healthy import BOARD
from tests.support.agents import Driven, attached, found_hung, hung, observed, suspected

LATE = hung(elapsed_s=60.1, timeout_s=60.0, at_ns=10**12, learned=True)
HUNG = "hung in 'step' for 60.1 s (learned timeout 60 s)"
PROGRESS = "rank 20 has read or written 12.0 MB"


def running(ranks: int = 2, *, nodes: int = 3, **options: object) -> Driven:
    """A node with the ranks 0, 10, ..."""
    driven = Driven(**{"max_nodes": nodes, "max_restarts": 3, **options})
    driven.run(ranks, nodes=nodes)
    driven.hear(*(attached(local_rank, 0, driven.now_ns) for local_rank in range(ranks)))
    driven.done.clear()
    return driven


def suspect(driven: Driven, local_rank: int = 0, **more: object) -> list[events.Effect]:
    verdict = replace(LATE, local_rank=local_rank, **more)  # type: ignore[arg-type]
    return driven.hear(suspected(local_rank, 0, verdict))


def reviewed(*hanging: int, rank: int | None = None, progress: str = "") -> Reviewed:
    rank = hanging[0] if len(hanging) == 1 else rank
    return Reviewed(
        cycle=0,
        asker=0,
        verdict=hung(elapsed_s=60.1, timeout_s=60.0),
        text=f"rank {rank} in train.py:7 step",
        rank=rank,
        decides=True,
        hanging=hanging,
        progress=progress,
    )


def answers(driven: Driven) -> list[tuple[int, float]]:
    """Local ranks and the timeouts to which theirs are extended, in seconds; 0: the rank hangs."""
    orders = [(each.local_rank, each.order) for each in driven.orders(ExtendTimeout)]
    return [(local_rank, order.timeout_s) for local_rank, order in orders if isinstance(order, ExtendTimeout)]


def hangs(driven: Driven) -> list[Hang]:
    return [each for each in driven.told if isinstance(each, Hang)]


def assert_evidence_is_asked_for(driven: Driven) -> None:
    """All ranks of the job are examined before anything is terminated."""
    assert [(hang.passive, hang.decides) for hang in hangs(driven)] == [(True, True)] * 2
    assert answers(driven) == driven.all_of(events.SignalRanks) == []


@pytest.mark.parametrize(
    ("review", "moved", "progress"),
    [
        (reviewed(0), 0, ""),
        (reviewed(0), 1, "rank 10 has called a hook"),
        (reviewed(0, progress=PROGRESS), 0, PROGRESS),
    ],
)
def test_verdict_is_dropped_where_a_rank_of_any_node_has_moved_on(review: Reviewed, moved: int, progress: str) -> None:
    driven = running(3)
    for local_rank in (0, 2):
        driven.boards[1] = BOARD._replace(ring_head=40)
        suspect(driven, local_rank)
    assert_evidence_is_asked_for(driven)
    driven.boards[1] = BOARD._replace(ring_head=40 + moved)
    driven.hear(review)
    until_s = 1.25 * 60.1 if progress else 0.0
    assert answers(driven) == [(0, until_s), (2, until_s)]
    line = (
        "rank 0: in 'step' for 60.1 s after iteration 7, longer than its learned "
        f"timeout of 60 s, but {progress}: extending the timeout, to at most 240.0 s in total"
    )
    assert driven.said == ([line] if progress else [])
    assert driven.written == (["more_time", "more_time"] if progress else [])


@pytest.mark.parametrize("observe_only", [False, True])
def test_extensions_end_at_four_timeouts_whoever_moves(observe_only: bool) -> None:
    driven = running(1, observe_only=observe_only)
    for elapsed_s in (239.0, 240.01):
        suspect(driven, elapsed_s=elapsed_s)
        driven.hear(reviewed(progress=PROGRESS))
    assert answers(driven) == [(0, 240.0), (0, 0.0)]
    line = (
        "rank 0 hung in 'step' for 240.0 s (learned timeout 60 s) after iteration 7: its timeout is extended "
        "to at most 240.0 s, terminating it although ranks make progress"
    )
    assert driven.said[1:] == ([] if observe_only else [line])


def test_ranks_of_a_node_are_observed_twice_for_a_question_that_looks() -> None:
    driven = running(2)
    for looks in (True, False):
        driven.done.clear()
        driven.hear(DiagnoseHang(0, passive=True, looks=looks))
        agains = [each.order.again_ns for each in driven.orders(Collect) if isinstance(each.order, Collect)]
        assert [again is not None and again > driven.now_ns for again in agains] == [looks, looks]
        driven.hear(*(observed(local_rank, 0, RankSnapshot(rank=0, local_rank=local_rank)) for local_rank in (0, 1)))


@pytest.mark.parametrize(
    ("hanging", "until_s"),
    [((20,), [120.1, 120.1]), ((0,), [0.0, 120.1]), ((10, 20), [120.1, 0.0]), ((), [0.0, 0.0])],
)
@pytest.mark.parametrize("learned", [True, False])
def test_suspects_that_only_wait_go_on_under_min_healthy(
    hanging: tuple[int, ...], until_s: list[float], learned: bool
) -> None:
    driven = running(restart_policy="min-healthy")
    for local_rank in (0, 1):
        suspect(driven, local_rank, learned=learned)
    assert_evidence_is_asked_for(driven)
    driven.hear(reviewed(*hanging))
    assert answers(driven) == [*enumerate(until_s)]
    assert driven.all_of(events.SignalRanks) == []


@pytest.mark.parametrize(
    ("hanging", "told"),
    [
        ((0,), f"rank 0 {HUNG} after iteration 7, in train.py:7 step"),
        ((), f"hang detected (first on rank 0: {HUNG}) after iteration 7, root cause undetermined"),
        # the text of the review lists the candidates
        ((0, 10), f"hang detected (first on rank 0: {HUNG}) after iteration 7, rank None in train.py:7 step"),
    ],
)
def test_confirmed_suspect_is_ended_at_once_under_min_healthy_and_told_with_its_place(
    hanging: tuple[int, ...], told: str
) -> None:
    driven = running(restart_policy="min-healthy")
    suspect(driven)
    driven.hear(reviewed(*hanging), found_hung(0, 0, LATE))
    assert driven.orders(Release) == [events.OrderMonitor(0, Release(0))]
    assert driven.orders(Collect) == [], "the ranks of all nodes were examined before"
    driven.exits(0, -9)
    (report,) = [each for each in driven.told if isinstance(each, m.Report)]
    assert report.state is NodeState.UNHEALTHY
    assert report.cause.text == told


def test_missing_rank_is_terminated_though_its_own_timeout_is_not_over() -> None:
    driven = running(restart_policy="min-healthy")
    suspect(driven, learned=False)
    driven.hear(reviewed(10))
    assert (answers(driven), driven.all_of(events.SignalRanks)) == ([(0, 120.1)], [events.SignalRanks((1,), 9)])
    driven.exits(1, -9, sent=(9,))
    assert driven.record.cause().text.startswith("rank 10 hung in 'step' for 60.1 s")
