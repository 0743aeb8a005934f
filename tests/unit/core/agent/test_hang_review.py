"""Under min-healthy a rank is terminated only if others wait for that rank: a node's part, and the coordinator's."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.core.agent import edge
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.hang_diagnosis import HangDiagnosis
from megatron_ft.core.job.messages import Reviewed
from megatron_ft.core.messages.monitor import ConfirmHang, ExtendTimeout
from tests.support.agents import Driven, attached, checked, hung, suspected
from tests.unit.core.job.test_lost_peer import left, stuck, waiting

LATE = hung(elapsed_s=4.1, timeout_s=4.0, at_ns=10**12)


def running(**options: object) -> Driven:
    """Two ranks of a node, 0 and 10."""
    driven = Driven(**{"min_healthy": True, "max_nodes": 3, "max_restarts": 3, **options})
    driven.run(2, nodes=3)
    driven.hear(*(attached(local_rank, 0, driven.now_ns) for local_rank in (0, 1)))
    driven.done.clear()
    return driven


def reviewed(*hanging: int, rank: int | None = None) -> Reviewed:
    rank = hanging[0] if len(hanging) == 1 else rank
    return Reviewed(
        cycle=0,
        asker=0,
        elapsed_s=4.1,
        timeout_s=4.0,
        text=f"rank {rank} in train.py:7 step",
        rank=rank,
        decides=True,
        hanging=hanging,
        kind="section",
        section="step",
    )


def orders(driven: Driven) -> list[edge.Effect]:
    return [
        each
        for each in driven.done
        if isinstance(each, edge.SignalRanks)
        or (isinstance(each, edge.OrderMonitor) and isinstance(each.order, ConfirmHang | ExtendTimeout))
    ]


def test_node_asks_for_a_review_and_terminates_nothing_before_the_answer() -> None:
    driven = running()
    driven.hear(suspected(0, 0, LATE))
    (hang,) = (each for each in driven.told if isinstance(each, m.Hang))
    assert (hang.passive, hang.decides, hang.verdict) == (True, True, LATE)
    assert orders(driven) == []


@pytest.mark.parametrize(
    ("review", "expected"),
    [
        (reviewed(20), [edge.OrderMonitor(0, ExtendTimeout(0, 8.1)), edge.OrderMonitor(1, ExtendTimeout(0, 8.1))]),
        (reviewed(0), [edge.OrderMonitor(0, ConfirmHang(0)), edge.OrderMonitor(1, ExtendTimeout(0, 8.1))]),
        (reviewed(10, 20), [edge.OrderMonitor(0, ExtendTimeout(0, 8.1)), edge.OrderMonitor(1, ConfirmHang(0))]),
        (reviewed(), [edge.OrderMonitor(0, ConfirmHang(0)), edge.OrderMonitor(1, ConfirmHang(0))]),
    ],
)
def test_suspects_that_only_wait_go_on(review: Reviewed, expected: list[edge.Effect]) -> None:
    driven = running()
    driven.hear(*(suspected(local_rank, 0, replace(LATE, local_rank=local_rank)) for local_rank in (0, 1)))
    driven.hear(review)
    assert orders(driven) == expected


def test_missing_rank_is_terminated_though_its_own_timeout_is_not_over() -> None:
    driven = running()
    driven.hear(suspected(0, 0, LATE))
    driven.hear(reviewed(10))
    assert orders(driven) == [edge.OrderMonitor(0, ExtendTimeout(0, 8.1)), edge.SignalRanks((1,), 9)]
    driven.exits(1, -9, sent=(9,))
    assert driven.record.cause().text.startswith("rank 10 hung in 'step' for 4.1 s")


def test_learned_timeout_that_is_confirmed_is_reviewed_too() -> None:
    driven = running()
    driven.hear(suspected(0, 0, replace(LATE, learned=True)))
    driven.hear(*(checked(local_rank, 0, "") for local_rank in (0, 1)))
    assert orders(driven) == []
    driven.hear(reviewed(20))
    assert orders(driven) == [edge.OrderMonitor(0, ExtendTimeout(0, 8.1))]


@pytest.mark.parametrize(
    ("missing", "hanging", "text"),
    [
        ((stuck(2),), (2,), "rank 2 (host-2) in train.py:7 next_batch; 2 others wait in all_reduce #5"),
        ((stuck(2), stuck(3)), (2, 3), "root cause undetermined; candidates: rank 2 in"),
        ((left(2),), (), "rank 2 has exited with 0"),
    ],
)
def test_coordinator_names_the_ranks_to_terminate(
    missing: tuple[RankSnapshot, ...], hanging: tuple[int, ...], text: str
) -> None:
    diagnosis = HangDiagnosis(LATE, None, 0, asked=[0], decides=True, now_s=0.0)
    diagnosis.told(0, [waiting(0), waiting(1), *(replace(note, quiet_s=4.0) for note in missing)])
    found = diagnosis.reviewed(0, several=True)
    assert found is not None
    assert (found.decides, found.hanging) == (True, hanging)
    assert found.text.startswith(text)
