"""Memory checkpoints in the launcher's machine: what it tells the coordinator, and what it asks of the keeper."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.launcher.rules import events
from megatron_ft.link.base.codec import Parts
from megatron_ft.link.facts.launcher import Cause, CauseKind, RestoreFailed, SnapshotRestored
from megatron_ft.memory.base.keeper_messages import RankBegan
from megatron_ft.memory.rules.snapshots import (
    Kept,
    Restore,
    Restored,
    SnapshotKey,
    StockTaken,
)
from tests.support.agents import Driven, held, verdict

KEY = SnapshotKey(0, 0, 7)


def restoring(driven: Driven, restore: Restore | None) -> list[events.Effect]:
    """Cycle 1 begins, and goes on from a snapshot."""
    begun = held(1, nodes=2)
    decision = replace(begun.decision, attachments=Parts() if restore is None else Parts(restore))
    asked = driven.hear(events.Tick(), replace(begun, decision=decision), events.RanksMet([0, 10], 0, 2, 4))
    driven.hear(events.RankStarted(rank=0, local_rank=0, pid=1, at_ns=driven.now_ns))
    driven.hear(events.RankStarted(rank=10, local_rank=1, pid=2, at_ns=driven.now_ns))
    return asked + driven.hear(events.RanksStarted())


def failed(driven: Driven, kept: Kept) -> None:
    """Cycle 0 has failed, and its ranks have ended."""
    driven.run(nodes=2)
    driven.exits(0, 1)
    driven.ends()
    driven.exits(1, -15, sent=(15,))
    driven.wait(60.0)
    driven.hear(StockTaken(kept), events.RanksEnded(), verdict(node=0))


FIRST, WHOLE = Restored(1, KEY, is_whole=False), Restored(1, KEY, newer_than=5)
LOGGED = events.Write(SnapshotRestored(cycle=1, key=KEY, ranks=(0, 10), seconds=0.7, redone=2, newer_than=5))


@pytest.mark.parametrize(
    ("began", "told"),
    [
        # the node has restored when its slowest rank has; from the first one on the snapshot counts as read
        ([RankBegan(KEY, 0.7, rank=0)] * 2 + [RankBegan(KEY, 0.2, 5, rank=10)] * 2, [FIRST, LOGGED, WHOLE]),
        ([RankBegan(KEY, rank=0), RankBegan(KEY, 0.2, rank=10)], [replace(FIRST, without=0), FIRST]),
        ([RankBegan(KEY, rank=0), RankBegan(KEY, rank=10)], [replace(FIRST, without=0)]),
        ([RankBegan(SnapshotKey(0, 0, 6), 0.2, rank=0), RankBegan(KEY, 0.2, rank=1)], []),
    ],
)
def test_node_has_restored_when_all_of_its_ranks_have(began: list[RankBegan], told: list[events.Effect]) -> None:
    driven = Driven(max_nodes=2)
    restoring(driven, Restore(KEY, reached=9))
    assert driven.hear(*began) == told


FAILED = RestoreFailed(rank=10, cycle=1, key=KEY, text="its digest differs")


@pytest.mark.parametrize("is_min_healthy", [False, True])
def test_rank_that_cannot_restore_makes_its_node_unhealthy_with_the_reason(is_min_healthy: bool) -> None:
    driven = Driven(max_nodes=2, restart_policy="min-healthy" if is_min_healthy else "any-failed")
    restoring(driven, Restore(KEY))
    asked = driven.hear(FAILED)
    text = "rank 10 can't restore iteration 7 from memory: its digest differs"
    (report,) = [each for each in asked if isinstance(each, m.Report)]
    assert (report.state, report.is_mixed) == (NodeState.UNHEALTHY, True)
    assert report.cause == Cause(kind=CauseKind.CRASH, text=text, rank=10)
    assert events.Write(FAILED) in asked
    assert driven.hear(RankBegan(KEY, 0.5, rank=0)) == []
    # whatever the rank does then
    driven.exits(1, 3)
    assert driven.record.cause().text == text
