"""How much the ranks of a node wait: what its launcher tells of it, and what it prints of the answer."""

from __future__ import annotations

from megatron_ft.diagnosis.launcher.slow_ranks_on_node import SlowRanksOnNode
from megatron_ft.diagnosis.waits import Lags, RankLag, RankWaits, Waits
from megatron_ft.launcher.rules.events import Write
from megatron_ft.link.base.layout import BoardSnapshot, CollectiveCounts
from megatron_ft.link.facts.launcher import SlowRank
from tests.support.agents import Driven, attached

LAG = RankLag(10, "node-b", 0.18, 0.02)
LINE = "rank 10 on node-b holds the others back: it spends 2% of its time in collectives, the others 20%"


def running(*, ranks: int = 2, **options: object) -> Driven:
    driven = Driven(**{"watch_collectives": "report", **options})
    driven.run(ranks)
    for local_rank in range(ranks):
        driven.hear(attached(local_rank, 0, driven.now_ns, watch_only=True))
    return driven


def sees(driven: Driven, local_rank: int, looks: int, waiting: int, waits: int) -> None:
    now_ns = driven.now_ns
    driven.collectives[local_rank] = CollectiveCounts(now_ns, now_ns, 5, 5, None, looks, waiting, waits)


def told(driven: Driven) -> list[tuple[RankWaits, ...]]:
    return [each.ranks for each in driven.told if isinstance(each, Waits)]


def test_looks_at_monitored_ranks_are_told_twice_in_a_window() -> None:
    driven = running()
    sees(driven, 0, 50, 10, 4)
    driven.wait(6.0)
    sees(driven, 1, 70, 70, 1)
    driven.wait(6.0)
    driven.boards[0] = BoardSnapshot(closing=True)
    driven.wait(6.0)
    both = RankWaits(0, 50, 10, 4), RankWaits(10, 70, 70, 1)
    assert told(driven) == [both[:1], both, both[1:]]


def test_slow_rank_is_printed_and_logged_once_and_so_is_its_end() -> None:
    driven = running()
    driven.hear(Lags(0, 15.0, (LAG,)))
    assert driven.said[-1] == "cycle 0 started: 2 ranks on 1 node"
    for slow in ((10,), (10,), (), ()):
        driven.hear(Lags(0, 15.0, (LAG,), slow))
    assert driven.said[-2:] == [f"{LINE} (reported only)", "rank 10 no longer holds the others back"]
    records = [each.record for each in driven.all_of(Write) if isinstance(each.record, SlowRank)]
    assert [(each.rank, each.node, each.lag, each.is_over) for each in records] == [
        (10, "node-b", 0.18, False),
        (10, "node-b", 0.18, True),
    ]
    assert driven.orders() == []
    part = next(each for each in driven.parts if isinstance(each, SlowRanksOnNode))
    assert part.lags.worst == (LAG,)
    driven.stop()
    driven.hear(Lags(0, 15.0, (LAG,), (10,)))
    assert part.lags.worst == ()
