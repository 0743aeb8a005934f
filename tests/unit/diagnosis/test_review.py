"""No collective completes: what the coordinator has looked into, and what it tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collective
from megatron_ft.diagnosis.hang_diagnosis import blamed, review
from megatron_ft.diagnosis.hang_messages import DiagnoseHang, Hang, RankSnapshots, Reviewed
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.link.facts.shared import RankHung
from tests.support.agents import hung
from tests.support.job_machines import begun

FIRST = hung(kind="collectives", section=None, elapsed_s=40.0, timeout_s=40.0, iteration=None, at_ns=9)


def waits(rank: int, seq: int = 7, op: str = "all_reduce") -> RankSnapshot:
    """A rank that is in a collective of all three."""
    entered = Collective(group="0", seq=seq, op=op, ranks=(0, 1, 2), backend="gloo")
    return RankSnapshot(
        rank=rank,
        host=f"host-{rank}",
        has_stack=True,
        has_collectives=True,
        in_flight=(entered,),
        enqueued={"gloo/0": seq},
        frame="train.py:3 step",
        open_s=41.0,
        quiet_s=41.0,
        collective_s=41.0,
    )


def works(rank: int, frame: str = "loader.py:8 read", *, seconds: float = 41.0, state: str = "S") -> RankSnapshot:
    """One that is in none."""
    return RankSnapshot(
        rank=rank,
        host=f"host-{rank}",
        state=state,
        has_stack=True,
        has_collectives=True,
        enqueued={"gloo/0": 6},
        frame=frame,
        open_s=seconds,
        quiet_s=seconds,
        collective_s=seconds,
    )


INTERVAL = hung(rank=1, elapsed_s=6.1, timeout_s=5.0, iteration=60, at_ns=10**12, learned=True)
TIME = "in 'step' for 6.1 s after iteration 60 (learned timeout 5 s)"
SLOW = replace(works(0, seconds=6.1), section="step", iteration=60)
STOPPED = RankSnapshot(rank=1, state="T", frame="train.py:9 f", seen_s=4.2, quiet_s=41.0, collective_s=41.0)


@pytest.mark.parametrize(
    ("first", "notes", "several", "rank", "text"),
    [
        (FIRST, [waits(0), works(1), waits(2)], False, 1, "rank 1 in loader.py:8 read; 2 others wait in all_reduce #7"),
        (FIRST, [waits(0), works(1), waits(2)], True, 1, "rank 1 (host-1) in loader.py:8 read; 2 others wait"),
        (FIRST, [waits(0), waits(1, op="barrier"), waits(2)], False, 1, "rank 1 in barrier #7, in train.py:3 step; 2"),
        (FIRST, [waits(0), STOPPED, waits(2)], False, 1, "rank 1 (process stopped) last seen 4 s ago in train.py:9 f;"),
        (
            FIRST,
            [works(0, "eval.py:1 f"), works(1, "eval.py:2 g")],
            False,
            None,
            "no rank waits in a collective: rank 0 in eval.py:1 f; rank 1 in eval.py:2 g",
        ),
        # an interval that is only reported, although collectives complete
        (INTERVAL, [SLOW, waits(1), waits(2)], True, 0, f"rank 0 (host-0) {TIME}, in loader.py:8 read"),
        (INTERVAL, [replace(works(rank), collective_s=0.1) for rank in range(3)], False, 1, f"rank 1 {TIME}"),
        (INTERVAL, [], False, 1, f"rank 1 {TIME}"),
    ],
)
def test_rank_that_keeps_the_others_waiting_is_told_with_its_place(
    first: RankHung, notes: Sequence[RankSnapshot], several: bool, rank: int | None, text: str
) -> None:
    found = review(notes, first, cycle=0, asker=0, are_all=bool(notes), several=several)
    assert found is not None
    assert (found.rank, found.reports) == (rank, "step" if first is INTERVAL else "")
    assert found.is_waited is any(note.in_flight for note in notes)
    assert found.text.startswith(text)


def test_the_cause_of_a_cycle_that_is_ended_for_it_says_so() -> None:
    cause = blamed([waits(0), works(1), waits(2)], FIRST, are_all=True, several=False)
    assert cause is not None
    assert cause.line == (
        "rank 1 keeps the others waiting: no collective has completed on any rank for 41.0 s (timeout 40.0 s), "
        "in loader.py:8 read; 2 others wait in all_reduce #7"
    )
    undecided = blamed([waits(0), works(1, seconds=1.0), works(2, seconds=1.0)], FIRST, are_all=True, several=False)
    assert undecided is not None
    assert undecided.line.startswith("no collective has completed on any rank for 40.0 s (timeout 40.0 s), root cause")


def tell(machine: Coordinator, *heard: tuple[int, Any], now_s: float = 1.0) -> list[actions.Send]:
    """What it sends when it has heard these."""
    effects = [effect for link, message in heard for effect in machine.heard(link, message, now_s)] + machine.settle(
        now_s
    )
    return [effect for effect in effects if isinstance(effect, actions.Send)]


ASKS, RULES = Hang(0, FIRST, passive=True), m.Rules(min_nodes=2, max_nodes=2, max_restarts=3)


def test_review_asks_and_tells_all_nodes_and_the_cycle_continues() -> None:
    machine = begun(RULES, "ab")
    (asked,) = tell(machine, (1, ASKS), (0, ASKS))
    assert (list(asked.links), asked.message) == ([0, 1], DiagnoseHang(0, passive=True))
    assert tell(machine, (0, RankSnapshots(0, (waits(0),), passive=True))) == []
    assert tell(machine, (1, RankSnapshots(0, (works(1),), passive=True, more=True))) == []
    (told,) = tell(machine, (1, RankSnapshots(0, (waits(2),), passive=True)))
    assert list(told.links) == [0, 1]
    assert isinstance(told.message, Reviewed)
    assert (told.message.asker, told.message.rank) == (1, 1)
    assert tell(machine, now_s=60.0) == []
    assert tell(machine, (0, ASKS), now_s=61.0) != []


def test_a_node_that_says_nothing_is_not_waited_for_for_ever() -> None:
    machine = begun(RULES, "ab")
    tell(machine, (0, ASKS), (0, RankSnapshots(0, (waits(0),), passive=True)))
    told = None
    while told is None:
        assert machine.alarm_s is not None
        assert machine.alarm_s < 5.0
        told = next(iter(tell(machine, now_s=machine.alarm_s)), None)
    assert isinstance(told.message, Reviewed)
    assert told.message.rank is None, "who isn't known of may be the one"


@pytest.mark.parametrize(
    ("other", "is_told"),
    [
        (works(1, seconds=2.0), False),  # it makes progress
        (replace(works(1), closing=True), False),  # it may go on without monitoring
        (replace(works(1), closing=True, raised="ValueError: no"), True),
        (replace(works(1), closing=True, gone=True, exitcode=0), True),
    ],
    ids=["moves", "shut down", "raised", "exited"],
)
def test_silence_is_not_told_where_a_rank_of_another_node_moves_or_may(other: RankSnapshot, is_told: bool) -> None:
    machine = begun(RULES, "ab")
    tell(machine, (0, ASKS), (0, RankSnapshots(0, (waits(0), waits(2)), passive=True)))
    told = tell(machine, (1, RankSnapshots(0, (other,), passive=True)))
    assert [sent.message.rank for sent in told if isinstance(sent.message, Reviewed)] == ([1] if is_told else [])


def test_a_hang_that_is_found_meanwhile_is_not_mixed_up_with_it() -> None:
    machine = begun(RULES, "ab")
    tell(machine, (0, ASKS))
    (asked,) = tell(machine, (1, Hang(0, FIRST)))
    assert asked.message == DiagnoseHang(0)
    tell(machine, *((link, RankSnapshots(0, (waits(link),), passive=True)) for link in (0, 1)))
    ended = tell(machine, *((link, RankSnapshots(0, (waits(link),))) for link in (0, 1)))
    assert any(isinstance(sent.message, m.End) for sent in ended)


@pytest.mark.parametrize(
    ("kind", "own_s", "told"),
    [
        ("section", 8.0, "rank 1 hung out of section for 4.2 s (timeout 3.0 s of rank 0)"),
        ("section", 4.0, "rank 1 hung out of section for 4.2 s (timeout 4.0 s)"),
        ("heartbeat", 8.0, "rank 1 sent no heartbeat for 3.1 s (timeout 3.0 s)"),
    ],
)
def test_timeout_of_another_rank_is_said_to_be_that_of_the_rank_that_exceeded_it(
    kind: str, own_s: float | None, told: str
) -> None:
    section = "step" if kind == "section" else None
    first = replace(FIRST, kind=kind, section=section, elapsed_s=3.1, timeout_s=3.0, at_ns=10**10)
    notes = [replace(waits(0), found_hung=True), replace(works(1, seconds=4.2), timeout_s=own_s), waits(2)]
    cause = blamed(notes, first, are_all=True, several=False)
    assert cause is not None
    assert cause.text == told
