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
from megatron_ft.job.parts import HEARD_BY_PARTS, LEADER_PARTS, SAID_BY_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.link.base.codec import Vocabulary
from megatron_ft.link.facts.shared import RankHung
from tests.support.agents import hung
from tests.support.arrived import arrived
from tests.support.job_machines import answers

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


def said(notes: Sequence[RankSnapshot], *, several: bool = False) -> Reviewed:
    """What comes of them."""
    return reviewed(notes, FIRST, several=several)


def reviewed(
    notes: Sequence[RankSnapshot], first: RankHung, *, are_all: bool = True, several: bool = False
) -> Reviewed:
    found = review(notes, first, cycle=0, asker=0, are_all=are_all, several=several)
    assert found is not None
    return found


def test_rank_missing_from_a_collective_is_named_with_its_place() -> None:
    found = said([waits(0), works(1), waits(2)])
    assert (found.rank, found.is_waited) == (1, True)
    assert found.text == "rank 1 in loader.py:8 read; 2 others wait in all_reduce #7"
    assert said([waits(0), works(1), waits(2)], several=True).text.startswith("rank 1 (host-1) in loader.py:8")


def test_rank_in_another_collective_than_the_others_is_named() -> None:
    found = said([waits(0), waits(1, op="barrier"), waits(2)])
    assert found.rank == 1
    assert found.text == "rank 1 in barrier #7, in train.py:3 step; 2 others wait in all_reduce #7"


def test_a_stopped_process_is_said_to_be() -> None:
    stopped = RankSnapshot(rank=1, state="T", frame="train.py:9 f", seen_s=4.2, quiet_s=41.0, collective_s=41.0)
    assert said([waits(0), stopped, waits(2)]).text.startswith(
        "rank 1 (process stopped) last seen 4 s ago in train.py:9 f; 2 others"
    )


def test_ranks_are_not_accused_where_none_waits_in_a_collective() -> None:
    found = said([works(0, "eval.py:1 f"), works(1, "eval.py:2 g")])
    assert (found.rank, found.is_waited) == (None, False)
    assert found.text == "no rank waits in a collective: rank 0 in eval.py:1 f; rank 1 in eval.py:2 g"


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


def running(nodes: str = "ab") -> Coordinator:
    """The coordinator of a cycle of these nodes, whose launchers' links are 0, 1 ..."""
    rules = m.Rules(min_nodes=len(nodes), max_nodes=len(nodes), max_restarts=3)
    machine = Coordinator("c", m.JobDefinition("job", rules), parts=LEADER_PARTS)
    for link, name in enumerate(nodes):
        machine.heard(link, m.Hello("job", rules, name, name, owns=name == "a"), 0.0)
        machine.heard(link, m.Ready(), 0.0)
    answers(machine, machine.settle(0.0))
    return machine


def tell(machine: Coordinator, *heard: tuple[int, Any], now_s: float = 1.0) -> list[actions.Send]:
    """What it sends when it has heard these."""
    effects = [effect for link, message in heard for effect in machine.heard(link, message, now_s)] + machine.settle(
        now_s
    )
    return [effect for effect in effects if isinstance(effect, actions.Send)]


ASKS = Hang(0, FIRST, passive=True)


def test_review_asks_and_tells_all_nodes_and_the_cycle_continues() -> None:
    machine = running()
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
    machine = running()
    tell(machine, (0, ASKS), (0, RankSnapshots(0, (waits(0),), passive=True)))
    told = None
    while told is None:
        assert machine.alarm_s is not None
        assert machine.alarm_s < 5.0
        told = next(iter(tell(machine, now_s=machine.alarm_s)), None)
    assert isinstance(told.message, Reviewed)
    assert told.message.rank is None, "who isn't known of may be the one"


def test_review_tells_nothing_where_ranks_of_another_node_make_progress() -> None:
    machine = running()
    tell(machine, (0, ASKS), (0, RankSnapshots(0, (waits(0), waits(2)), passive=True)))
    assert tell(machine, (1, RankSnapshots(0, (works(1, seconds=2.0),), passive=True))) == []


@pytest.mark.parametrize(
    ("change", "is_told"),
    [({}, False), ({"raised": "ValueError: no"}, True), ({"gone": True, "exitcode": 0}, True)],
    ids=["shut down", "raised", "exited"],
)
def test_silence_is_not_told_while_a_rank_without_monitoring_may_go_on(change: dict[str, Any], is_told: bool) -> None:
    machine = running()
    tell(machine, (0, ASKS), (0, RankSnapshots(0, (waits(0), waits(2)), passive=True)))
    left = replace(works(1), closing=True, **change)
    told = tell(machine, (1, RankSnapshots(0, (left,), passive=True)))
    assert [sent.message.rank for sent in told if isinstance(sent.message, Reviewed)] == ([1] if is_told else [])


def test_a_hang_that_is_found_meanwhile_is_not_mixed_up_with_it() -> None:
    machine = running()
    tell(machine, (0, ASKS))
    (asked,) = tell(machine, (1, Hang(0, FIRST)))
    assert asked.message == DiagnoseHang(0)
    tell(machine, *((link, RankSnapshots(0, (waits(link),), passive=True)) for link in (0, 1)))
    ended = tell(machine, *((link, RankSnapshots(0, (waits(link),))) for link in (0, 1)))
    assert any(isinstance(sent.message, m.End) for sent in ended)


@pytest.mark.parametrize(
    "message", [ASKS, DiagnoseHang(0, True), RankSnapshots(0, (), True), said([waits(0), works(1)])]
)
def test_message_of_a_review_survives_the_wire(message: m.FromMember | m.ToMember) -> None:
    assert Vocabulary(HEARD_BY_PARTS | SAID_BY_PARTS).parse(arrived(message)) == message


INTERVAL = hung(rank=1, elapsed_s=6.1, timeout_s=5.0, iteration=60, at_ns=10**12, learned=True)


def test_rank_at_fault_is_named_for_an_interval_that_is_only_reported() -> None:
    slow = replace(works(0, "loader.py:8 read", seconds=6.1), section="step", iteration=60)
    found = reviewed([slow, waits(1), waits(2)], INTERVAL, several=True)
    assert (found.rank, found.reports, found.verdict.iteration, found.is_waited) == (0, "step", 60, True)
    head = "rank 0 (host-0) in 'step' for 6.1 s after iteration 60 (learned timeout 5 s), in loader.py:8 read"
    assert found.text.startswith(head)


def test_rank_found_first_is_named_without_evidence() -> None:
    found = reviewed([], INTERVAL, are_all=False)
    assert found.text == "rank 1 in 'step' for 6.1 s after iteration 60 (learned timeout 5 s)"


def test_interval_is_reported_although_collectives_complete() -> None:
    notes = [replace(works(rank), collective_s=0.1) for rank in range(3)]
    for first, is_reported in [(INTERVAL, True), (FIRST, False)]:
        found = review(notes, first, cycle=0, asker=0, are_all=True, several=False)
        assert (found is not None) is is_reported


@pytest.mark.parametrize(
    ("kind", "own_s", "told"),
    [
        ("section", 8.0, "rank 1 hung out of section for 4.2 s (timeout 3.0 s of rank 0)"),
        ("section", None, "rank 1 hung out of section for 4.2 s (timeout 3.0 s of rank 0)"),
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
