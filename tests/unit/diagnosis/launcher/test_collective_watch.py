"""Ranks whose scripts call no hooks, by torch's counts of their collectives: when the launcher asks, and then."""

from __future__ import annotations

import msgspec
import pytest

from megatron_ft.diagnosis.exceptions import CrashOutput
from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Hang, RankSnapshots, Reviewed
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import messages as m
from megatron_ft.launcher.rules import events
from megatron_ft.link.base.layout import BoardSnapshot, CollectiveCounts, SectionView
from megatron_ft.link.facts.launcher import CauseKind, Finding
from megatron_ft.link.messages.monitor_messages import Collect
from tests.support.agents import Driven, attached, hung, observed, verdict

TIMEOUT_S = 40.0
BOARD = BoardSnapshot(iteration=0, first_iteration=0)
SILENT = hung(kind="collectives", section=None, iteration=None, elapsed_s=40.0, timeout_s=40.0)
REVIEW = Reviewed(cycle=0, asker=0, verdict=SILENT, text="rank 10 in train.py:3 f", rank=10, is_waited=True)


def watching(**options: object) -> Driven:
    """A cycle whose ranks have just been seen to complete a collective each."""
    driven = Driven(**{"watch_collectives": f"report:{TIMEOUT_S}", **options})
    driven.run()
    for local_rank in range(2):
        driven.hear(attached(local_rank, 0, driven.now_ns, watch_only=True))
        moves(driven, local_rank)
    return driven


def moves(driven: Driven, local_rank: int) -> None:
    """A rank has completed another one."""
    known = driven.collectives[local_rank]
    count = 1 if known is None else known.completed + 1
    driven.collectives[local_rank] = CollectiveCounts(driven.now_ns, driven.now_ns, count, count)


def asked(driven: Driven) -> list[Hang]:
    """What it has asked the coordinator."""
    return [said for said in driven.told if isinstance(said, Hang)]


def test_silence_of_all_ranks_is_asked_about_when_its_time_is_over_and_once() -> None:
    driven = watching()
    driven.wait(5.0)
    moves(driven, 1)
    driven.wait(TIMEOUT_S - 0.01)
    assert asked(driven) == []
    driven.wait(0.02)
    (hang,) = asked(driven)
    assert hang.passive
    assert hang.verdict.elapsed_s == pytest.approx(TIMEOUT_S, abs=0.02)
    driven.hear(REVIEW)
    driven.wait(10 * TIMEOUT_S)
    assert len(asked(driven)) == 1
    assert driven.said[-1] == (
        "no collective has completed on any rank for 40 s: rank 10 in train.py:3 f "
        "(reported only, no rank is terminated)"
    )
    assert driven.written[-1] == "hang_reported"


def test_progress_after_a_silence_is_told_and_the_next_silence_again() -> None:
    driven = watching()
    for times in (1, 2):
        driven.wait(TIMEOUT_S * 1.5)
        driven.hear(REVIEW)
        moves(driven, 0)
        driven.wait(10.0)
        assert driven.said[-1] == "collectives complete again on this node, after 60 s"
        assert len(asked(driven)) == times
        moves(driven, 0)


@pytest.mark.parametrize(("timeouts", "is_asked"), [((9, 9), False), ((9, None), True), ((None, None), True)])
def test_silence_of_ranks_with_hooks_is_asked_about_unless_timeouts_apply_to_all(
    timeouts: tuple[int | None, int | None], is_asked: bool
) -> None:
    driven = watching()
    for local_rank, timeout_s in enumerate(timeouts):
        driven.hear(attached(local_rank, 0, driven.now_ns))
        timeout_ns = None if timeout_s is None else timeout_s * 10**12
        driven.boards[local_rank] = BOARD._replace(
            sections=(SectionView("step", driven.now_ns, 9, timeout_ns),), start_ns=1, iterations_seen=9
        )
    driven.wait(2 * TIMEOUT_S)
    assert bool(asked(driven)) is is_asked


@pytest.mark.parametrize(("group_s", "after_s"), [(20.0, 10.0), (600.0, 300.0), (None, 300.0)])
def test_default_time_of_silence_is_half_of_the_process_groups_timeout(group_s: float | None, after_s: float) -> None:
    driven = Driven(watch_collectives="report")
    driven.run()
    group_ns = None if group_s is None else round(group_s * 1e9)
    for local_rank in range(2):
        driven.hear(attached(local_rank, 0, driven.now_ns, watch_only=True))
        driven.collectives[local_rank] = CollectiveCounts(driven.now_ns, driven.now_ns, 1, 1, group_ns)
    driven.wait(after_s - 0.1)
    assert asked(driven) == []
    driven.wait(10.1)
    (hang,) = asked(driven)
    assert hang.verdict.timeout_s == after_s


@pytest.mark.parametrize(("closing", "is_asked"), [((True, True), False), ((True, False), True)])
def test_counts_of_a_rank_that_has_ended_its_monitoring_are_no_silence(
    closing: tuple[bool, bool], is_asked: bool
) -> None:
    """A rank that is still monitored may wait for one that raised: the coordinator knows."""
    driven = watching()
    driven.boards.update({lr: BOARD._replace(closing=True) for lr, is_closing in enumerate(closing) if is_closing})
    driven.wait(TIMEOUT_S + 1.0)
    assert [hang.verdict.local_rank for hang in asked(driven)] == ([1] if is_asked else [])


def test_time_that_is_nobodys_does_not_count() -> None:
    """The ranks were paused, the node was stopped, or it stood still without that anybody says so."""
    driven = watching()
    driven.wait(30.0)
    driven.pauses.begin(driven.now_ns)
    driven.wait(100.0)
    driven.pauses.end(driven.now_ns)
    driven.wait(9.0)
    assert asked(driven) == []
    driven.hear(events.Continued())
    driven.wait(TIMEOUT_S - 1.0)
    assert asked(driven) == []
    moves(driven, 0)
    driven.wait(30.0)
    driven.wait(300.0, late=True)
    assert asked(driven) == []
    driven.wait(TIMEOUT_S)
    assert len(asked(driven)) == 1


@pytest.mark.parametrize("why", ["off", "none", "left"])
def test_ranks_without_process_groups_are_not_judged(why: str) -> None:
    """Or nothing is read; or one has no use for its group any more, and the others work on something else."""
    driven = watching(**{"watch_collectives": "off"} if why == "off" else {})
    driven.wait(5.0)
    if why == "none":
        driven.collectives.clear()
    elif why == "left":
        driven.collectives[1] = None
    driven.wait(10 * TIMEOUT_S)
    assert asked(driven) == []


def test_ranks_are_looked_at_without_a_signal_and_anew_for_a_hang() -> None:
    driven = watching()
    driven.exits(0)
    for frame, passive in (("train.py:3 f", True), ("train.py:9 g", False)):
        driven.hear(DiagnoseHang(0, passive=passive))
        collect = driven.orders(Collect)[-1]
        assert (collect.local_rank, collect.order.passive) == (1, passive)
        driven.hear(observed(1, 0, RankSnapshot(rank=10, local_rank=1, frame=frame)))
        notes = [said for said in driven.told if isinstance(said, RankSnapshots)][-1]
        assert notes.passive is passive
        assert [(note.rank, note.gone, note.frame) for note in notes.notes] == [(0, True, ""), (10, False, frame)]


def ended(driven: Driven) -> list[Hang]:
    """What it wants the cycle to be ended for."""
    return [hang for hang in asked(driven) if not hang.passive]


def test_cycle_is_ended_for_collectives_by_the_node_that_asked() -> None:
    driven = watching(watch_collectives=f"end:{TIMEOUT_S}")
    driven.wait(TIMEOUT_S + 1.0)
    driven.hear(msgspec.structs.replace(REVIEW, asker=1))
    assert ended(driven) == []
    assert "hang_reported" not in driven.written
    driven.hear(REVIEW)
    (hang,) = ended(driven)
    assert (hang.verdict.rank, hang.verdict.kind) == (10, "collectives")
    assert driven.said[-1].endswith("(terminating the ranks)")
    # this time they may be signalled: they are about to be ended
    assert {(each.local_rank, each.order.passive) for each in driven.orders(Collect)} == {(0, False), (1, False)}
    driven.ends()
    driven.exits(0, -15, sent=(15,))
    driven.exits(1, -15, sent=(15,))
    told = verdict(node=0, kind=CauseKind.HANG, rank=10, text="rank 10 hung")
    cause = msgspec.structs.replace(told.cause, detail="in train.py:3 f; rank 0 waits in all_reduce")
    driven.hear(events.RanksEnded(), msgspec.structs.replace(told, cause=cause))
    (finding,) = [each.record for each in driven.all_of(events.Write) if isinstance(each.record, Finding)]
    assert (finding.rank, finding.text) == (10, cause.detail)


@pytest.mark.parametrize("why", ["nobody waits", "observe-only", "min-healthy", "min-healthy, no rank is at fault"])
def test_cycle_is_not_ended_where_no_rank_waits_or_under_observe_only(why: str) -> None:
    """Nor under ``min-healthy``, where the node of the rank at fault ends that."""
    observes, policy = why == "observe-only", "min-healthy" if why.startswith("min-healthy") else "any-failed"
    driven = watching(watch_collectives=f"end:{TIMEOUT_S}", observe_only=observes, restart_policy=policy)
    driven.wait(TIMEOUT_S + 1.0)
    rank = 99 if why in ("observe-only", "min-healthy") else None
    driven.hear(msgspec.structs.replace(REVIEW, rank=rank, is_waited=why != "nobody waits"))
    assert ended(driven) == driven.all_of(events.SignalRanks) == []
    assert driven.said[-1].endswith("(terminating the ranks)" if why == "min-healthy" else "no rank is terminated)")


@pytest.mark.parametrize("has_raised", [False, True])
def test_rank_at_fault_is_ended_by_its_node_under_min_healthy(has_raised: bool) -> None:
    driven = watching(watch_collectives=f"end:{TIMEOUT_S}", restart_policy="min-healthy")
    if has_raised:
        driven.words[1] = CrashOutput(error="ValueError: no", where="train.py:9 g", raised_at_ns=driven.now_ns + 5)
    driven.wait(TIMEOUT_S)
    driven.hear(REVIEW)
    assert [each.local_ranks for each in driven.all_of(events.SignalRanks)] == [(1,)]
    driven.exits(1, -9, sent=(9,))
    silence = "keeps the others waiting: no collective has completed on any rank for 40.0 s (timeout 40.0 s)"
    told = "raised ValueError: no, in train.py:9 g" if has_raised else f"{silence}, in train.py:3 f"
    assert driven.record.cause().line == f"rank 10 {told}"


def test_node_of_a_rank_that_has_finished_and_keeps_the_others_waiting_is_unhealthy_under_min_healthy() -> None:
    driven = watching(watch_collectives=f"end:{TIMEOUT_S}", restart_policy="min-healthy")
    driven.exits(1, 0)
    driven.wait(TIMEOUT_S)
    driven.hear(msgspec.structs.replace(REVIEW, text="rank 10 has exited with 0"))
    (report,) = [each for each in driven.told if isinstance(each, m.Report)]
    assert report.cause is not None
    assert report.cause.rank == 10
