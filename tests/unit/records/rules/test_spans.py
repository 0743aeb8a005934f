"""Spans of one node's cycles."""

from __future__ import annotations

import itertools

from megatron_ft.link.facts.launcher import Cause, CauseKind, CycleEnded, CycleStarted, NodeHealth
from megatron_ft.records.rules.spans import (
    CYCLE,
    FAULT,
    HEALTH_CHECK,
    IS_OVERHEAD,
    RENDEZVOUS,
    ROUND_WAIT,
    RUN,
    TEARDOWN,
    WORKER_START,
    NodeSpans,
    Span,
)

S = 1_000_000_000
CAUSE = Cause(kind=CauseKind.HANG, text="rank 3 hung", rank=3, host="b", section="step", iteration=12)


def cycle(number: int = 0, *, begins: int = 0, ended: CycleEnded | None = None) -> dict[str, Span]:
    """Spans of a cycle that begins ``begins`` s after the launcher's start, on a launcher that started at 100 s."""
    spans, at = NodeSpans("a", 100 * S), (100 + begins) * S
    if begins:
        spans.hear(CycleEnded(cycle=number - 1, outcome="failed", cause=CAUSE), at)
    started = CycleStarted(
        cycle=number,
        group_rank=1,
        max_restarts=5,
        restarts_left=4,
        begun_ns=at + 3 * S,
        met_ns=at + 4 * S,
        spawned_ns=at + 6 * S,
    )
    over = ended or CycleEnded(cycle=number, outcome="failed", cause=CAUSE, noticed_ns=at + 16 * S, iteration=11)
    found = [
        *spans.hear(NodeHealth(cycle=number, good=True, seconds=1.5), at + 2 * S),
        *spans.hear(started, at + 6 * S),
        *spans.hear(over, at + 20 * S),
    ]
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def seconds(span: Span) -> tuple[float, float]:
    return span.begin_ns / S, span.end_ns / S


def test_spans_of_a_cycle_follow_each_other_from_the_health_check_to_its_end() -> None:
    found = cycle()
    names = [ROUND_WAIT, RENDEZVOUS, WORKER_START, RUN, TEARDOWN]
    assert [seconds(found[name]) for name in names] == [
        (102.0, 103.0),
        (103.0, 104.0),
        (104.0, 106.0),
        (106.0, 116.0),
        (116.0, 120.0),
    ]
    assert all(found[a].end_ns == found[b].begin_ns for a, b in itertools.pairwise([HEALTH_CHECK, *names]))
    assert (seconds(found[HEALTH_CHECK]), seconds(found[CYCLE])) == ((100.5, 102.0), (100.0, 120.0))
    assert found.keys() == IS_OVERHEAD.keys()
    assert {each.cycle_begin_ns for each in found.values()} == {100 * S}


def test_failed_cycle_and_its_fault_have_the_cause_as_their_error() -> None:
    found = cycle()
    assert {name for name, span in found.items() if span.error} == {CYCLE, FAULT}
    assert found[CYCLE].error == "rank 3 hung after iteration 12"
    good = cycle(ended=CycleEnded(cycle=0, outcome="succeeded", iteration=11))
    assert not any(span.error for span in good.values())


def test_next_cycle_begins_at_the_end_of_the_one_before() -> None:
    found = cycle(1, begins=50)
    assert seconds(found[CYCLE]) == (150.0, 170.0)
    assert found[CYCLE].attributes["nvrx.cycle"] == 1


def test_verdict_is_on_the_fault_and_place_and_outcome_on_the_cycle() -> None:
    found = cycle()
    verdict = {k: v for k, v in found[FAULT].attributes.items() if k.startswith("megatron_ft.")}
    assert verdict == {
        "megatron_ft.cause.kind": "hang",
        "megatron_ft.cause.text": "rank 3 hung after iteration 12",
        "megatron_ft.cause.rank": 3,
        "megatron_ft.cause.host": "b",
        "megatron_ft.cause.section": "step",
        "megatron_ft.cause.iteration": 12,
    }
    assert found[CYCLE].attributes == {
        "nvrx.cycle": 0,
        "nvrx.node": "a",
        "nvrx.cycle_outcome": "failed",
        "nvrx.rank": 1,
        "nvrx.max_restarts": 5,
        "nvrx.remaining_restarts": 4,
        "megatron_ft.iteration": 11,
    }


def test_only_the_time_in_which_ranks_run_is_no_overhead() -> None:
    marked = {name: span.attributes.get("is_goodput_span") for name, span in cycle().items()}
    assert [name for name, is_overhead in marked.items() if is_overhead is False] == [RUN]
    assert marked[CYCLE] is None
