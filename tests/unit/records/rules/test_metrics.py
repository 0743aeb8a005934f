"""Counters by the records of one launcher, or of all nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ft.link.facts.all_kinds import Record, Timed
from megatron_ft.link.facts.launcher import (
    Cause,
    CauseKind,
    CycleEnded,
    CycleStarted,
    HangReported,
    NodeLost,
    TrainingAgain,
)
from megatron_ft.link.facts.monitor import FirstIteration
from megatron_ft.records.rules.metrics import (
    DOWNTIME,
    HANGS,
    ITERATION,
    METRICS,
    NODE_STATE,
    RANK_LAG,
    REDONE,
    REPORTED,
    RESTARTS,
    TIMEOUT,
    GaugeValues,
    Histogram,
    JobMetrics,
    Metric,
    NodeActivity,
)
from tests.support.accounts import account

HANG = Cause(kind=CauseKind.HANG, text="rank 1 hung", section="step")
LOST = Cause(text="node 1 lost")


def values(
    *records: tuple[str, Record], readings: GaugeValues | None = None
) -> Mapping[Metric, Mapping[tuple[str, ...], float | Histogram]]:
    metrics = JobMetrics()
    for host, record in records:
        metrics.hear(record, host)
    told = account([Timed(at, 0, host, record) for at, (host, record) in enumerate(records)])
    readings = replace(readings or GaugeValues(), accounting=told)
    return {each.metric: each.values for each in metrics.series(readings, of_job=True)}


def started(cycle: int, place: int = 0) -> CycleStarted:
    return CycleStarted(cycle=cycle, group_rank=place)


def test_restart_and_hang_are_counted_by_cause_and_section() -> None:
    found = values(
        ("a", started(0)),
        ("a", CycleEnded(cycle=0, outcome="failed", cause=HANG, action="restart")),
        ("a", started(1)),
        ("a", CycleEnded(cycle=1, outcome="failed", cause=LOST, action="give_up")),
    )
    assert found[RESTARTS] == {("hang",): 1, ("crash",): 0, ("signal",): 0, ("request",): 0, ("membership",): 0}
    assert found[HANGS] == {("step",): 1}


def test_downtime_and_redone_iterations_add_up_over_cycles() -> None:
    found = values(
        ("a", started(0)),
        ("a", FirstIteration(rank=0, cycle=0, iteration=10, at_ns=1)),
        ("a", CycleEnded(cycle=0, outcome="failed", cause=HANG, action="restart", iteration=19)),
        ("a", started(1)),
        ("a", FirstIteration(rank=0, cycle=1, iteration=12, at_ns=4)),
        ("a", TrainingAgain(cycle=1, seconds={"stop": 1.0, "rendezvous": 0.5}, redone=7)),
        ("a", started(2)),
        ("a", TrainingAgain(cycle=2, seconds={"stop": 2.0, "set up": 4.0})),
    )
    assert {k: v for k, v in found[DOWNTIME].items() if v} == {("stop",): 3.0, ("rendezvous",): 0.5, ("set up",): 4.0}
    assert found[REDONE] == {(): 7}


def test_reported_hang_is_counted_by_what_was_overdue() -> None:
    report = HangReported(cycle=0, rank=1, section="step", iteration=3, elapsed_s=9.0)
    found = values(("a", started(0)), ("a", report), readings=GaugeValues(timeouts={"setup": 30.0}))
    assert found[REPORTED] == {("setup",): 0, ("collectives",): 0, ("step",): 1}


def test_section_with_a_timeout_has_a_count_of_hangs_before_the_first_one() -> None:
    found = values(readings=GaugeValues(timeouts={"step": 30.0}, iteration=5))
    assert (found[HANGS], found[TIMEOUT], found[ITERATION]) == ({("step",): 0}, {("step",): 30.0}, {(): 5})


def test_lost_node_is_shown_until_it_takes_part_again() -> None:
    lost, back = ("a", NodeLost(cycle=0, node="b")), ("a", CycleStarted(cycle=2, group_rank=0, back=("b",)))
    here = GaugeValues(nodes={"a": NodeActivity.TRAINING})
    assert values(lost, ("a", started(1)), readings=here)[NODE_STATE][("b", "lost")] == 1
    assert {node for node, _ in values(lost, back, readings=here)[NODE_STATE]} == {"a"}


def test_only_place_0_shows_metrics_of_the_job() -> None:
    metrics = JobMetrics()
    metrics.hear(started(0, place=1))
    assert not metrics.is_at_place_0
    shown = [each.metric for each in metrics.series(GaugeValues(), of_job=False)]
    assert shown == [each for each in METRICS if not each.of_job]
    metrics.hear(started(1, place=0))
    assert metrics.is_at_place_0


def test_no_counter_has_a_label_that_grows_with_a_run() -> None:
    found = {label for each in METRICS if each is not RANK_LAG for label in each.labels}
    assert not found & {"iteration", "pid", "rank", "cycle", "run_id"}
    assert RANK_LAG.kind == "gauge"
