"""The launcher's own timeouts: pauses and stand-stills count for no rank."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from megatron_ft.config.config import ConfigValues
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.restart_policy import NodeState
from megatron_ft.launcher.rules import events
from megatron_ft.link.facts.shared import RankHung
from megatron_ft.link.messages.monitor_messages import Collect
from tests.support.agents import Driven, attached, detached, observed
from tests.unit.monitor.rules.test_monitor_state import board, section


def started(ranks: int = 1, **options: object) -> Driven:
    driven = Driven(**options)
    driven.run(ranks)
    return driven


def late(driven: Driven) -> list[tuple[object, object, object]]:
    """Rank, kind and seconds of each verdict of the launcher's."""
    written = [each.record for each in driven.all_of(events.Write) if isinstance(each.record, RankHung)]
    return [(verdict.rank, verdict.kind, verdict.elapsed_s) for verdict in written]


def test_rank_that_starts_late_is_terminated_then_killed() -> None:
    driven = started(2, startup_timeout=30.0, rank_termination_signal=signal.SIGTERM)
    driven.hear(attached(0, 0, driven.now_ns))
    driven.wait(29.9)
    assert late(driven) == []
    driven.wait(0.2)
    assert late(driven) == [(10, "startup", 30.0)]
    assert driven.all_of(events.SignalRanks) == [events.SignalRanks((1,), signal.SIGTERM)]
    driven.wait(5.0)
    assert driven.all_of(events.SignalRanks)[1:] == [events.SignalRanks((1,), signal.SIGKILL)]
    driven.exits(1, -9)
    (report,) = driven.told[1:]
    assert isinstance(report, m.Report)
    assert (report.state, report.cause.rank) == (NodeState.UNHEALTHY, 10)
    assert report.cause.text == "rank 10 did not start monitoring within 30 s (--ft-startup-timeout)"
    driven = started(startup_timeout=30.0)
    driven.stop()
    driven.wait(60.0)
    assert late(driven) == [], "no rank need start once the launcher stops"


@pytest.mark.parametrize("stopped", [None, 1])
def test_startup_timeout_of_several_ranks_accuses_a_stopped_one_only(stopped: int | None) -> None:
    driven = started(3, startup_timeout=30.0)
    driven.hear(attached(2, 0, driven.now_ns))
    driven.stopped.update({} if stopped is None else {stopped: True})
    driven.now_ns += 1
    driven.wait(30.0)
    driven.exits(0, -9, sent=(9,))
    cause = driven.record.cause()
    assert cause.rank == (None if stopped is None else 10)
    assert ("rank 0; rank 10" in cause.detail) is (stopped is None)


def test_a_rank_is_looked_at_before_it_is_ended() -> None:
    driven = started(exit_timeout=20.0)
    driven.hear(attached(0, 0, driven.now_ns), detached(0, 0, driven.now_ns))
    driven.wait(20.0)
    assert driven.orders(Collect) == [events.OrderMonitor(0, Collect(0, driven.now_ns + 2_000_000_000, False))]
    driven.wait(1.9)  # its monitor has two seconds
    driven.hear(observed(0, 0, RankSnapshot(rank=0, frame="train.py:3 save")))
    assert driven.all_of(events.SignalRanks) == []
    driven.wait(0.1)
    assert driven.all_of(events.SignalRanks) == [events.SignalRanks((0,), signal.SIGKILL)]
    assert driven.record.cause().detail == "in train.py:3 save"


@pytest.mark.parametrize("spend", ["pause", "late timer", "signal", "pause, late timer", "pause, signal"])
def test_time_in_which_no_rank_could_run_is_not_that_of_its_start(spend: str) -> None:
    """It is taken off once, though a late timer, a SIGCONT and a pause may tell of the same time."""
    driven = started(startup_timeout=30.0)
    if "pause" in spend:
        driven.pauses.begin(driven.now_ns)
        if spend == "pause":
            driven.wait(100.0)
        else:
            driven.now_ns += 60_000_000_000
        driven.pauses.end(driven.now_ns)
    elif spend == "late timer":
        driven.wait(100.0, late=True)
    else:
        driven.wait(20.0)
    if "signal" in spend:
        driven.hear(events.Continued())
    driven.wait(29.0)
    assert late(driven) == []
    driven.wait(1.1)
    assert late(driven) == [(0, "startup", 30.0)]


@pytest.mark.parametrize("is_heard_first", [True, False])
def test_rank_that_does_not_exit_has_finished_too_but_a_stand_still_does_not_count(is_heard_first: bool) -> None:
    driven = started(2, exit_timeout=20.0)
    driven.boards[1] = board(closing=True)
    driven.exits(0)
    driven.hear(attached(1, 0, driven.now_ns))
    goodbye = detached(1, 0, driven.now_ns)
    driven.wait(15.0)
    driven.hear(*([goodbye, events.Continued()] if is_heard_first else [events.Continued(), goodbye]))
    driven.wait(19.0)
    assert late(driven) == []
    driven.wait(3.1)
    assert late(driven) == [(10, "exit", 20.0)]
    driven.exits(1, -9)
    assert driven.said[-1].endswith("because the other ranks of this node have finished")
    assert driven.told[-1] == m.Report(0, NodeState.SUCCEEDED)


SECTIONS = ConfigValues(rank_section_timeouts={"setup": 20.0, "step": 5.0})
HEARTBEATS = ConfigValues(rank_heartbeat_timeout=5.0)


@pytest.mark.parametrize(
    ("options", "hooked", "after_s", "said"),
    [
        ({"learning": SECTIONS}, (), 20.0, "ranks 0, 10 have"),
        ({"learning": SECTIONS}, (0,), 20.0, "rank 10 has"),
        ({"learning": SECTIONS}, (0, 1), 20.0, None),
        ({"learning": HEARTBEATS}, (), 120.0, "ranks 0, 10 have"),
        ({}, (), 120.0, None),  # nothing is configured
        ({"learning": SECTIONS, "startup_timeout": 500.0}, (), 500.0, None),  # they are terminated
    ],
)
def test_ranks_with_timeouts_that_call_no_hook_are_named_once(
    options: dict[str, Any], hooked: tuple[int, ...], after_s: float, said: str | None
) -> None:
    driven = started(2, **options)
    driven.hear(*(attached(local_rank, 0, driven.now_ns) for local_rank in hooked))
    driven.wait(after_s - 0.1)
    assert not [line for line in driven.said if "are configured" in line]
    driven.wait(1000.0)
    told = "not called setup or init_workload_monitoring: hangs there are not detected"
    found = [line for line in driven.said if "are configured" in line]
    assert found == ([] if said is None else [f"timeouts are configured, but {said} {told}"])


@pytest.mark.parametrize(
    ("learning", "heartbeats", "is_said"), [(HEARTBEATS, 0, True), (HEARTBEATS, 3, False), (SECTIONS, 0, False)]
)
def test_heartbeat_timeouts_are_said_not_to_apply_to_a_script_that_only_opens_sections(
    learning: ConfigValues, heartbeats: int, is_said: bool
) -> None:
    driven = started(2, learning=learning)
    driven.hear(*(attached(local_rank, 0, driven.now_ns) for local_rank in range(2)))
    driven.boards.update({0: board(sections=(section(),), heartbeats=heartbeats), 1: board()})
    driven.wait(200.0)
    assert (
        "heartbeat timeouts are configured, but rank 0 opens sections and sends no heartbeat: they do not apply"
        in driven.said
    ) is is_said
