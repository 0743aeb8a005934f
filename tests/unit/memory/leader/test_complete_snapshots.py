"""Memory checkpoints at the coordinator: which are complete, which are chosen, and what users are told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from megatron_ft.job.parts import LEADER_PARTS
from megatron_ft.job.rules import actions
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.coordinator import Coordinator
from megatron_ft.job.rules.decisions import DecisionRecord
from megatron_ft.job.rules.job_cycle import Seat
from megatron_ft.job.rules.messages import Report
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import Action, JobProgress, NodeState, Outcome, Reached, RestartDecision
from megatron_ft.link.base.codec import Parts
from megatron_ft.link.facts.launcher import Cause, CauseKind
from megatron_ft.memory.leader.complete_snapshots import CompleteSnapshots
from megatron_ft.memory.leader.snapshots_part import ranks_failed
from megatron_ft.memory.rules.snapshots import (
    EARLIER_LIFE,
    Kept,
    KeptSnapshot,
    Restore,
    Restored,
    Saved,
    SavedFiles,
    Settled,
    SnapshotKey,
)
from tests.support.job_machines import answers, begun, links, sent

RULES = m.Rules(min_nodes=2, max_nodes=2, max_restarts=9)


def key(iteration: int, cycle: int = 0) -> SnapshotKey:
    return SnapshotKey(cycle, 0, iteration)


def settled(iteration: int, complete: int | None = -1) -> Settled:
    """Up to that iteration; -1: it is complete."""
    return Settled(key(iteration), None if complete is None else key(iteration if complete < 0 else complete))


def kept(place: int, *keys: SnapshotKey) -> Kept:
    return Kept(tuple(KeptSnapshot(each, 2, (place,)) for each in keys), 1)


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        ([(0, 5), (1, 5)], [None, (5, 5)]),
        ([(0, 5), (0, 5), (1, 5)], [None, None, (5, 5)]),
        ([(0, 5), (0, 6), (1, 5), (1, 6)], [None, None, (5, 5), (6, 6)]),
        ([(0, 5), (0, 6), (0, 7), (1, 5)], [None, None, None, (5, 5)]),
        # one skips what the other has
        ([(0, 5), (1, 6)], [None, (5, None)]),
        ([(0, 5), (0, 7), (1, 6)], [None, None, (6, None)]),
        ([(0, 5), (0, 7), (1, 6), (1, 7)], [None, None, (6, None), (7, 7)]),
        ([(0, 4), (1, 4), (0, 5), (1, 6)], [None, (4, 4), None, (5, 4)]),
        # nothing older than what was said
        ([(0, 6), (0, 5), (1, 5)], [None, None, (5, None)]),
    ],
)
def test_snapshot_is_complete_when_all_nodes_hold_it_and_passed_over_when_one_has_skipped_it(
    said: list[tuple[int, int]], answers: list[tuple[int, int | None] | None]
) -> None:
    snapshots = CompleteSnapshots(0, 2)
    found = [snapshots.saved(place, key(iteration)) for place, iteration in said]
    assert found == [None if each is None else settled(*each) for each in answers]


def test_restored_is_said_once_when_all_nodes_have_and_not_again_by_a_coordinator_that_takes_over() -> None:
    snapshots, said = CompleteSnapshots(1, 2, key(5)), Restored(1, key(5))
    told = [(0, said), (0, said), (1, Restored(1, key(4))), (1, said), (1, said)]
    assert [snapshots.restored(*each) for each in told] == [False, False, False, True, False]
    first_told_another = CompleteSnapshots(1, 2, key(5))
    first_told_another.restored(0, said)
    assert [first_told_another.restored(1, said) for _ in range(2)] == [True, False]


def crash(text: str) -> Cause:
    return Cause(kind=CauseKind.CRASH, text=text, rank=1)


def fails_and_meets(
    machine: Coordinator, cycle: int, *stock: Kept, text: str = "rank 1 raised NaN", is_mixed: bool = False
) -> tuple[Restore | None, list[str]]:
    """Rank 1 fails after iteration 9, and both nodes are ready again. Return what is restored then, and the lines."""
    report = m.Report(cycle, NodeState.UNHEALTHY, crash(text), Reached(0, 9), is_mixed=is_mixed)
    machine.heard(1, report, 0.0)
    machine.settle(0.0)
    for link, each in enumerate(stock):
        machine.heard(link, m.Ready(Parts(each)), 0.0)
    effects = answers(machine, machine.settle(0.0))
    return restored(effects, cycle + 1), lines(effects)


def restored(effects: list[actions.CoordinatorEffect], cycle: int) -> Restore | None:
    """What the cycle that is decided upon goes on from."""
    (decided,) = [each.decision for each in effects if isinstance(each, DecisionRecord)]
    assert decided.cycle == cycle
    return decided.attachments.get(Restore)


def lines(effects: list[actions.CoordinatorEffect]) -> list[str]:
    told = [each.message for each in effects if isinstance(each, actions.Send) and isinstance(each.message, m.Tell)]
    return [each.text for each in told]


STOCK = kept(0, key(7)), kept(1, key(7))


def in_cycle_1() -> Coordinator:
    """A job whose second cycle goes on from iteration 7; the first one ended at 9."""
    machine = begun(RULES, "ab")
    assert fails_and_meets(machine, 0, *STOCK) == (Restore(key(7), reached=9), [])
    return machine


@pytest.mark.parametrize(("newer_than", "more"), [(None, ""), (5, ", newer than the 5 on disk")])
def test_all_are_told_once_the_snapshot_is_restored(newer_than: int | None, more: str) -> None:
    machine, message = in_cycle_1(), Restored(1, key(7), newer_than=newer_than)
    assert machine.heard(0, message, 0.0) == []
    told = machine.heard(1, message, 0.0)
    assert lines(told) == [f"restored iteration 7 from memory{more}, 2 iterations redone"]
    assert links(told, m.Tell) == [0, 1]


FILES = SavedFiles("iteration-7-of-2", 7, 2, 3 * 3600.0)
EARLIER = SnapshotKey(EARLIER_LIFE, 0, 7)


def test_first_cycle_restores_files_and_so_does_the_next_as_long_as_it_is_the_newest() -> None:
    found, other = Kept(local_ranks=1, files=FILES, reads_files=True), Kept(local_ranks=1, reads_files=True)
    machine = begun(RULES, "ab", [found, other])
    for link in (0, 1):
        said = lines(machine.heard(link, Restored(0, EARLIER), 0.0))
    assert said == ["restored iteration 7 from the files of an earlier life, written 3 h ago"]
    restore, _ = fails_and_meets(machine, 0, found, other)
    assert restore is not None
    assert (restore.key, restore.files) == (EARLIER, FILES.name)
    newer = replace(kept(0, key(9, 1)), files=FILES), kept(1, key(9, 1))
    restore, _ = fails_and_meets(machine, 1, *newer, text="killed")
    assert restore is not None
    assert (restore.key, restore.files) == (key(9, 1), "")
    said = "cycle 3 restores nothing from memory: no keeper says that it has a snapshot"
    assert fails_and_meets(machine, 2, found, other, text="killed again") == (None, [said])  # files are left behind


def test_files_of_another_number_of_ranks_are_not_restored_and_one_line_says_why() -> None:
    machine = Coordinator("c", m.JobDefinition("job", m.Rules(1, 1)), parts=LEADER_PARTS)
    machine.heard(0, m.Hello("job", m.Rules(1, 1), "a", "a", owns=True), 0.0)
    machine.heard(0, m.Ready(Parts(Kept(local_ranks=4, files=FILES, reads_files=True))), 0.0)
    effects = answers(machine, machine.settle(0.0))
    assert lines(effects) == [
        "cycle 0 restores nothing from memory: the snapshot of iteration 7 in files is of 2 ranks, not 4"
    ]


@pytest.mark.parametrize(
    ("is_read", "text", "is_mixed", "tries"),
    [
        (True, "rank 1 raised NaN", False, [1, None, None]),
        (False, "rank 1 can't restore iteration 7 from memory: No such file", True, [1, None, None]),
        (False, "no route to the store", False, [0, 0, 0]),
    ],
)
def test_snapshot_is_bad_and_all_are_told_once_two_cycles_that_read_it_have_failed(
    is_read: bool, text: str, is_mixed: bool, tries: list[int | None]
) -> None:
    machine, bad = in_cycle_1(), "2 cycles that restored iteration 7 failed before a new one"
    for cycle, number in enumerate(tries, 1):
        if is_read:
            machine.heard(0, Restored(cycle, key(7), is_whole=False), 0.0)
        again, said = fails_and_meets(machine, cycle, *STOCK, text=text, is_mixed=is_mixed)
        assert (again and again.tries) == number
        assert (f"cycle {cycle + 1} restores nothing from memory: {bad}" in said) == (cycle == 2 and number is None)


WHOLE, FIRST, WITHOUT = (Restored(1, key(7), *given) for given in ((True,), (False,), (False, 1)))


@pytest.mark.parametrize(
    ("told", "is_mixed"),
    [
        ([(0, FIRST), (1, WITHOUT)], True),
        ([(1, WITHOUT), (0, FIRST)], True),
        ([(0, WHOLE), (1, WITHOUT)], True),
        ([(1, FIRST), (1, WITHOUT)], True),
        ([(1, WITHOUT), (1, FIRST), (0, WHOLE)], True),
        ([(0, WITHOUT), (1, WITHOUT)], False),
        ([(0, WHOLE), (1, WHOLE)], False),
        ([(0, FIRST), (1, WHOLE)], False),
    ],
)
def test_cycle_in_which_some_ranks_restore_and_others_do_not_ends_with_a_line(
    told: list[tuple[int, Restored]], is_mixed: bool
) -> None:
    machine = in_cycle_1()
    for link, message in told:
        machine.heard(link, message, 0.0)
    ended = machine.settle(0.0)
    assert links(ended, m.End) == ([0, 1] if is_mixed else [])
    text = "rank 1 begins without iteration 7, which other ranks have restored from memory"
    assert [each.cause.text for each in sent(ended, m.Verdict)] == ([text] if is_mixed else [])


def test_saved_snapshot_is_answered_at_once_and_needs_no_settling() -> None:
    machine = begun(RULES, "ab")
    machine.settle(0.0)
    assert machine.heard(0, Saved(key(5)), 0.0) == []
    assert links(machine.heard(1, Saved(key(5)), 0.0), Settled) == [0, 1]
    assert not machine.needs_settling


def verdict(kind: CauseKind, text: str, rank: int | None, outcome: Outcome = Outcome.FAILED) -> m.Verdict:
    decision = RestartDecision(action=Action.RESTART, restarts_left=1, reason="")
    return m.Verdict(0, outcome, Cause(kind=kind, text=text, rank=rank), decision)


def seat(state: NodeState, kind: CauseKind = CauseKind.MEMBERSHIP, *, follows: bool = False) -> Seat:
    return Seat(Report(0, state, Cause(kind=kind, text="x", rank=0, follows=follows)), Node("a", "a"))


@pytest.mark.parametrize(
    ("found", "seats", "failed"),
    [
        (verdict(CauseKind.CRASH, "rank 3 raised NaN", 3), [], True),
        (verdict(CauseKind.SIGNAL, "rank 3 killed", 3), [], True),
        (verdict(CauseKind.HANG, "rank 3 hung for 9.5 s", 3), [], True),
        (verdict(CauseKind.MEMBERSHIP, "no message", None), [seat(NodeState.LOST)], False),
        (verdict(CauseKind.REQUEST, "stopped", None), [], False),
        (verdict(CauseKind.CRASH, "left", 3, Outcome.MEMBERSHIP), [], False),
        # with min-healthy the cause is that too few are left
        (verdict(CauseKind.MEMBERSHIP, "1 of 2", None), [seat(NodeState.UNHEALTHY, CauseKind.CRASH)], True),
        (verdict(CauseKind.MEMBERSHIP, "x", None), [seat(NodeState.UNHEALTHY, CauseKind.CRASH, follows=True)], False),
    ],
)
def test_failure_of_a_rank_counts_against_a_snapshot_and_the_loss_of_a_node_does_not(
    found: m.Verdict, seats: list[Seat], *, failed: bool
) -> None:
    assert ranks_failed(found, seats) is failed


def test_job_is_given_up_for_lack_of_progress_only_after_a_cycle_that_went_on_from_the_file() -> None:
    policy, stalled = m.Rules(1, 1, max_restarts=9, max_stalled=3), JobProgress(0, 30, stalled=3)
    assert policy.decide(Outcome.FAILED, advance=stalled).no_progress
    assert policy.decide(Outcome.FAILED, advance=stalled, restored=True).action is Action.RESTART
