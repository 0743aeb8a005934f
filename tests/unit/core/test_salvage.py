"""Of a damaged document what can be used is used."""

from __future__ import annotations

from megatron_ft.core.facts import launcher, monitor
from megatron_ft.core.facts.all_kinds import RECORDS
from megatron_ft.core.facts.launcher import Cause, CauseKind, RankStarted
from tests.support.arrived import logged


def test_damaged_record_keeps_the_fields_that_can_be_used() -> None:
    cause = {"rank": [1], "kind": "hang", "text": 5, "detail": None}
    doubts: list[str] = []
    damaged = {"ev": "cycle_ended", "cycle": 3, "iteration": 1.5, "cause": cause, "else": [1]}
    found = RECORDS.salvage(logged(damaged), doubts)
    assert found == launcher.CycleEnded(cycle=3, cause=Cause(kind=CauseKind.HANG))
    assert doubts == ["cause has rank = a list", "cause has text = 5", "cycle_ended has iteration = 1.5"]
    doubts = []
    sections = {"a": 1.0, "b": "x", "c": None}
    timeouts = RECORDS.salvage(logged({"ev": "timeouts", "rank": 0, "cycle": 0, "sections": sections}), doubts)
    assert timeouts == monitor.Timeouts(rank=0, cycle=0, sections={"a": 1.0, "c": None})
    assert doubts == ["'b': 'x'"]
    doubts = []
    ranks = [{"rank": 1}, {"rank": {}}, 7]
    started = RECORDS.salvage(logged({"ev": "cycle_started", "cycle": 0, "ranks": ranks}), doubts)
    assert started == launcher.CycleStarted(cycle=0, ranks=(RankStarted(rank=1),))
    assert len(doubts) == 3
    doubts = []
    assert RECORDS.salvage(logged({"ev": "cycle_ended", "cycle": "0"}), doubts) is None
    assert RECORDS.salvage(logged({"ev": "verdict"}), doubts) is None
    assert doubts[1:] == [
        "cycle_ended has no cycle",
        "verdict has no rank, cycle, kind, at_ns, since_ns, elapsed_s, timeout_s",
    ]
    doubts = []
    assert RECORDS.salvage(logged({"ev": "of_a_newer_version", "cycle": []}), doubts) is None
    assert doubts == []
