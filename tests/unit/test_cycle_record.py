"""When a node trains again: from its monitors' words, and from the boards of ranks that have ended."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.core.board.layout import BoardSnapshot
from megatron_ft.core.diagnosis.exceptions import LastWords
from megatron_ft.core.diagnosis.exits import HangVerdict
from megatron_ft.core.records.monitor import Attached, FirstStep
from megatron_ft.ipc.files.event_log import NullEventLog
from megatron_ft.launcher.cycle import announce, cycle_record
from megatron_ft.launcher.cycle.cycle_record import CycleRecord
from tests.unit.test_monitor_state import board


class FakeNode:
    """What is said goes to ``said``; the cycle before failed, and its ranks were gone ``ago_s`` seconds ago."""

    def __init__(self, ago_s: float) -> None:
        stopped_ns = time.monotonic_ns() - round(ago_s * 1e9)
        self.failure_ns: tuple[int, int] | None = (stopped_ns - 1, stopped_ns)
        self.said: list[str] = []
        self.say = self.said.append
        self.log = NullEventLog()


def record_of(boards: dict[int, BoardSnapshot]) -> CycleRecord:
    record = CycleRecord(3, [0, 1], snapshot=boards.get, log=NullEventLog())
    for local_rank in (0, 1):
        record.workers[local_rank] = worker(local_rank)
    return record


def worker(local_rank: int) -> Any:
    now = time.monotonic_ns()
    return SimpleNamespace(
        local_rank=local_rank,
        pid=100 + local_rank,
        exitcode=0,
        signals_sent=set(),
        signalled_at_ns=None,
        exited_at_ns=now,
        started_at_ns=now,
    )


def trains(local_rank: int) -> FirstStep:
    return FirstStep(cycle=3, rank=local_rank, at_ns=time.monotonic_ns())


@pytest.mark.parametrize("ends", [(), (1,), (0, 1)])
def test_a_rank_that_has_ended_says_on_its_board_whether_it_was_through_a_step(ends: tuple[int, ...]) -> None:
    stepped = board(first_step_at_ns=time.monotonic_ns())
    node, record = FakeNode(ago_s=1.0), record_of({0: stepped, 1: stepped})
    for local_rank in (0, 1):
        announce.training_again(node, record)  # type: ignore[arg-type]
        assert node.said == []
        if local_rank in ends:
            record.ended(record.workers[local_rank])
        else:
            record.told_by_monitor(local_rank, trains(local_rank))
    announce.training_again(node, record)  # type: ignore[arg-type]
    announce.training_again(node, record)  # type: ignore[arg-type]
    (line,) = node.said
    assert line.startswith("cycle 3 is training again ")


def test_a_rank_that_ended_before_its_first_step_trained_at_no_time() -> None:
    node, record = FakeNode(ago_s=1.0), record_of({0: board(first_step_at_ns=time.monotonic_ns()), 1: board()})
    for local_rank in (0, 1):
        record.ended(record.workers[local_rank])
        announce.training_again(node, record)  # type: ignore[arg-type]
    assert node.said == []


def test_what_is_heard_late_of_the_cycle_that_failed_is_no_training_again() -> None:
    node, record = FakeNode(ago_s=-1.0), record_of({})
    for local_rank in (0, 1):
        record.told_by_monitor(local_rank, trains(local_rank))
    announce.training_again(node, record)  # type: ignore[arg-type]
    assert node.said == []
    assert node.failure_ns is not None


def test_a_hung_rank_that_should_be_gone_and_lives_counts_as_failed_unless_it_got_no_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited_ns = 0
    monkeypatch.setattr(cycle_record, "_HUNG_AND_ALIVE_S", 0.05)
    monkeypatch.setattr(cycle_record, "run_delays_ns", lambda pid: {pid: waited_ns})
    record = record_of({})
    hang = {"rank": 1, "local_rank": 1, "kind": "section", "section": "step", "elapsed_s": 2.0, "timeout_s": 1.0}
    record.found_hung(HangVerdict(**hang, iteration=3, at_ns=time.monotonic_ns()))  # type: ignore[arg-type]
    found = time.monotonic()
    assert not record.has_outlived_its_end()
    waited_ns = 300_000_000
    while not record.has_outlived_its_end():
        time.sleep(0.01)
    assert time.monotonic() - found >= 0.3
    record.ended(record.workers[1])
    assert not record.has_outlived_its_end()


@pytest.mark.parametrize("has_group", [False, True])
@pytest.mark.parametrize("forked", [False, True])
def test_what_the_time_of_a_start_went_into(has_group: bool, forked: bool) -> None:
    """Up to its hello nothing is known of a script; whether it had a process group by then is."""
    record = record_of({})
    start = record.spawned_ns or 0
    for local_rank in (0, 1):
        # the last rank counts, and of one that connects again only the first time
        at = start + local_rank * 1000
        hello = Attached(
            cycle=3,
            rank=local_rank,
            pid=1,
            at_ns=at + 100,
            has_group=has_group and local_rank == 1,
            user_code_ns=at + 10 if forked else None,
        )
        record.told_by_monitor(local_rank, hello)
        record.told_by_monitor(local_rank, replace(hello, at_ns=at + 10**9, user_code_ns=None))
        trained = replace(trains(local_rank), began_ns=at + 200, at_ns=at + 300)
        record.told_by_monitor(local_rank, trained)
    phases = record.phases_ns() or {}
    user_code = {"user code": 1010} if forked else {}
    imports = "imports and process group" if has_group else "imports"
    expected = {**user_code, imports: 1100, "set up": 1200, "first step": 1300}
    assert {name: at - start for name, at in phases.items() if at > start} == expected
    assert list(phases) == ["rendezvous", "ranks created", *expected]


def test_a_phase_that_is_not_known_of_all_ranks_is_not_told() -> None:
    record = record_of({})
    record.told_by_monitor(0, Attached(cycle=3, rank=0, pid=1, at_ns=time.monotonic_ns()))
    for local_rank in (0, 1):
        record.told_by_monitor(local_rank, trains(local_rank))
    assert list(record.phases_ns() or {}) == ["rendezvous", "ranks created", "first step"]


def test_while_the_nodes_meet_nobody_trains() -> None:
    """What monitors say of the last cycle is heard meanwhile; the ranks of the next one have no numbers yet."""
    node, record = FakeNode(ago_s=1.0), CycleRecord(4, [], snapshot={}.get, log=NullEventLog())
    record.met_ns = time.monotonic_ns() - 1
    record.told_by_monitor(0, trains(0))
    announce.training_again(node, record)  # type: ignore[arg-type]
    assert node.said == []


@pytest.mark.parametrize(
    ("error", "goes_on", "told"),
    [
        ("ValueError: the batch is empty", False, "rank 1 raised ValueError: the batch is empty, in train.py:3 step"),
        ("ValueError: the batch is empty", True, None),
        ("RuntimeError: gloo: Connection closed by peer", False, None),
        ("", False, None),
    ],
)
def test_a_rank_that_is_ending_of_its_exception_has_failed_by_itself(
    error: str, goes_on: bool, told: str | None
) -> None:
    raised_ns = 5_000
    boards = {local_rank: board(last_transition_ns=raised_ns + (1 if goes_on else -1)) for local_rank in (0, 1)}
    words = {1: LastWords(error=error, where="train.py:3 step", raised_at_ns=raised_ns)}
    record = CycleRecord(
        3, [0, 1], snapshot=boards.get, log=NullEventLog(), last_words=lambda lr: words.get(lr, LastWords())
    )
    for local_rank in (0, 1):
        record.workers[local_rank] = worker(local_rank)
    failure = record.own_failure()
    assert (None if failure is None else failure.line) == told
