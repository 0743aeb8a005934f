"""Who hangs and who waits for it. Pure."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collective
from megatron_ft.diagnosis.rank_snapshot import (
    RankSnapshot,
    is_in_library,
    is_waiting_for_process,
    lost_process,
    place,
)
from megatron_ft.diagnosis.root_cause import find, waits_for
from megatron_ft.diagnosis.stacks import Frame
from megatron_ft.link.base.codec import decode, encode, to_builtins

WORLD = (0, 1, 2, 3)


def note(rank: int, **fields: Any) -> RankSnapshot:
    """A rank that has stood still for 10 s and tells its collectives."""
    usual = {
        "iteration": 7,
        "quiet_s": 10.0,
        "has_stack": True,
        "has_collectives": True,
        "frame": f"train.py:{rank} step",
    }
    return RankSnapshot(rank=rank, **{**usual, **fields})


def inside(
    rank: int, *, group: str = "0", seq: int = 6, op: str = "all_reduce", ranks: tuple[int, ...] = WORLD, **fields: Any
) -> RankSnapshot:
    """A rank that waits in a collective."""
    entered = {**fields.pop("enqueued", {}), f"/{group}": seq}
    one = Collective(group=group, seq=seq, op=op, ranks=ranks)
    return note(rank, in_flight=(one,), enqueued=entered, waits_in=op, **fields)


def outside(rank: int, *, seq: int = 5, **fields: Any) -> RankSnapshot:
    """A rank that hasn't entered what the others wait in."""
    return note(rank, **{"enqueued": {"/0": seq}, **fields})


def test_a_rank_that_has_raised_and_doesn_t_end_is_the_cause() -> None:
    """Its interpreter may take long to end, or wait for ever in a destructor, with the section still open."""
    mine, theirs = "ValueError: the batch is empty", "RuntimeError: gloo: connection closed by peer"
    notes = [
        inside(0),
        note(1, found_hung=True, raised=theirs),
        note(2, raised=mine, frame="train.py:2 step", waits_in="barrier"),
        inside(3),
    ]
    finding = find(notes, elapsed_s=10.0)
    assert finding.rank == 2
    assert finding.text.startswith("in train.py:2 step, has not exited; ")
    assert decode(RankSnapshot, encode(notes[2])) == notes[2]
    # of several the one that was first to
    both = [note(1, raised="ValueError: a", raised_s=0.5), note(2, raised="ValueError: b", raised_s=0.7), inside(3)]
    assert find(both, elapsed_s=10.0).rank == 2
    # where all have only lost a peer, that decides nothing
    notes[2] = note(2, raised=theirs)
    assert find(notes, elapsed_s=10.0).rank is None
    # one of them alone isn't it either: who it has lost may be on a node that tells nothing
    alone = [inside(0, ranks=(), found_hung=True), note(1, raised=theirs)]
    assert find(alone, elapsed_s=10.0).rank is None


def test_rank_whose_evidence_is_alone_is_accused_only_if_it_does_not_wait() -> None:
    """The other nodes can't be asked: then who is seen to wait isn't it."""
    assert find([note(1, found_hung=True)], elapsed_s=10.0).rank == 1
    assert find([inside(1, ranks=(1,), found_hung=True)], elapsed_s=10.0).rank == 1
    waits = find([inside(1, found_hung=True)], elapsed_s=10.0, are_all=False)
    assert (waits.rank, waits.candidates) == (None, (0, 2, 3))
    blind = note(1, found_hung=True, has_collectives=False, waits_in="all_reduce")
    assert find([blind], elapsed_s=10.0, are_all=False).rank is None
    assert find([note(1, found_hung=True)], elapsed_s=10.0, are_all=False).rank == 1


HANDLING = "ValueError: sample 17 is broken, in train.py:13 step"


def test_exception_that_is_being_handled_decides_where_collectives_do_not_and_is_always_told() -> None:
    closing = inside(1, group="1", seq=1, op="barrier", ranks=(0, 1), handling=HANDLING)
    pair = [inside(0, ranks=(0, 1)), closing]
    assert find([pair[0], replace(closing, handling="")], elapsed_s=10.0).rank is None
    finding = find(pair, elapsed_s=10.0)
    assert finding.rank == 1
    assert finding.text.startswith(f"raised {HANDLING}, then waits in barrier #1 of group 1, in train.py:1 step; ")
    both = find([replace(pair[0], handling=HANDLING), closing], elapsed_s=10.0)
    assert both.rank is None
    assert HANDLING in both.text
    lost = "RuntimeError: gloo: Connection closed by peer"
    assert find([pair[0], replace(closing, handling=lost)], elapsed_s=10.0).rank is None


def test_exception_that_is_being_handled_accuses_no_rank_beside_one_that_is_outside() -> None:
    notes = [inside(0, handling="FileExistsError: out, in train.py:3 prepare"), inside(1), outside(2), inside(3)]
    assert find(notes, elapsed_s=10.0).rank == 2


def mute(rank: int) -> RankSnapshot:
    """A rank that lives and whose threads don't answer: it holds the GIL."""
    return RankSnapshot(rank=rank, state="R", is_busy=True)


def test_rank_that_alone_does_not_answer_is_the_candidate_while_all_others_wait() -> None:
    finding = find([inside(0), inside(1), mute(2), inside(3)], elapsed_s=10.0)
    assert (finding.rank, finding.candidates) == (None, (2,))
    assert finding.text.endswith("candidates: rank 2 does not answer (no stack could be collected, process state R)")
    seen = find([inside(0), outside(1), mute(2), inside(3)], elapsed_s=10.0)
    assert seen.rank == 1, "a rank that is seen outside the collective"
    assert find([inside(0), mute(1), mute(2), inside(3)], elapsed_s=10.0).candidates == ()


def test_rank_that_waits_for_a_waiting_rank_is_no_cause() -> None:
    """Tensor pairs (0, 1), (2, 3), data pairs (0, 2), (1, 3): 3 hangs, 2 waits for it, 0 for 2, 1 for 3 or 0."""
    notes = [
        inside(0, group="dp0", ranks=(0, 2), seq=4, found_hung=True),
        inside(1, group="dp1", ranks=(1, 3), seq=4),
        inside(2, group="tp1", ranks=(2, 3), seq=8, enqueued={"/dp0": 3}),
        note(3, enqueued={"/tp1": 7, "/dp1": 3}),
    ]
    assert waits_for(notes) == {0: {2}, 1: {3}, 2: {3}, 3: frozenset()}
    assert find(notes, elapsed_s=10.0).rank == 3


def test_pipeline_neighbours_are_traced_to_the_rank_that_keeps_them_waiting() -> None:
    """1 waits to receive from 0, 2 from 1, and 0 is in Python."""

    def receiving(rank: int) -> RankSnapshot:
        one = Collective(group="pp", seq=3, op=f"recv {rank}<-{rank - 1}", ranks=(0, 1, 2), p2p=True)
        return note(rank, in_flight=(one,))

    finding = find([note(0), receiving(1), receiving(2)], elapsed_s=10.0)
    assert finding.rank == 0
    assert finding.text.endswith("2 others wait in recv 1<-0 #3 of group pp and other collectives")


@pytest.mark.parametrize("odd", WORLD)
def test_rank_in_another_collective_than_all_others_is_the_cause(odd: int) -> None:
    """Everybody waits for somebody; only the odd one's wait explains all the others."""
    notes = [
        inside(rank, group="9", seq=1, op="barrier", enqueued={"/0": 5}) if rank == odd else inside(rank)
        for rank in WORLD
    ]
    assert find(notes, elapsed_s=10.0).rank == odd


def test_two_ranks_that_wait_for_each_other_are_both_candidates() -> None:
    notes = [inside(0, ranks=(0, 1)), inside(1, group="9", seq=1, ranks=(0, 1), enqueued={"/0": 5}, found_hung=True)]
    finding = find(notes, elapsed_s=10.0)
    assert (finding.rank, finding.candidates) == (None, (0, 1))
    assert "root cause undetermined; candidates" in finding.text


def test_finding_without_candidates_says_root_cause_undetermined() -> None:
    finding = find([note(1, waits_in="all_reduce")], elapsed_s=10.0, are_all=False)
    assert (finding.rank, finding.candidates, finding.text) == (None, (), "root cause undetermined")


@pytest.mark.parametrize("state", ["T", "t", "D"])
def test_a_stopped_or_stuck_process_is_the_cause(state: str) -> None:
    notes = [outside(rank, found_hung=rank == 0) for rank in (0, 1, 2)] + [note(3, state=state, has_collectives=False)]
    assert find(notes, elapsed_s=10.0).rank == 3


def test_absent_rank_that_is_an_iteration_behind_is_the_cause() -> None:
    notes = [inside(0, found_hung=True), inside(1), outside(2), outside(3, iteration=6)]
    assert find(notes, elapsed_s=10.0).rank == 3
    notes[3] = outside(3)
    assert find(notes, elapsed_s=10.0).candidates == (2, 3)


def test_a_rank_whose_lock_is_held_is_told_by_its_absence() -> None:
    notes = [inside(0, found_hung=True), inside(1), inside(2), note(3, has_collectives=False)]
    finding = find(notes, elapsed_s=10.0)
    assert finding.rank == 3
    assert "holding the GIL" in finding.text


def test_stacks_tell_the_missing_rank_without_the_flight_recorder() -> None:
    notes = [note(rank, has_collectives=False, waits_in="all_reduce", found_hung=rank == 0) for rank in (0, 1, 2)]
    assert find([*notes, note(3, has_collectives=False)], elapsed_s=10.0).rank == 3
    assert find([*notes, note(3, has_collectives=False, waits_in="barrier")], elapsed_s=10.0).rank is None


def test_a_rank_that_has_left_is_what_the_others_wait_for() -> None:
    assert (
        find([inside(0, found_hung=True), inside(1), note(2, gone=True, has_collectives=False)], elapsed_s=10.0).rank
        == 2
    )
    finding = find([inside(0, found_hung=True), inside(1), outside(2, closing=True)], elapsed_s=10.0)
    assert finding.rank == 2
    assert finding.text.startswith("has ended its monitoring")


def unseen(rank: int) -> RankSnapshot:
    """A rank that was found hung, and ended before anything was told of it."""
    return RankSnapshot(rank=rank, iteration=7, found_hung=True)


def test_a_rank_of_which_nothing_was_seen_may_have_waited_for_one_that_was() -> None:
    finding = find([unseen(0), inside(1), inside(2), outside(3)], elapsed_s=10.0)
    assert (finding.rank, finding.text.endswith("; 2 others wait in all_reduce #6")) == (3, True)
    assert find([unseen(0), outside(1)], elapsed_s=10.0).candidates == (0, 1)
    assert find([unseen(0), outside(1, quiet_s=1.0)], elapsed_s=10.0).rank == 0
    assert find([unseen(0), outside(1, closing=True)], elapsed_s=10.0).rank == 0
    assert find([unseen(0), outside(1, iteration=6)], elapsed_s=10.0).rank == 1


def test_overdue_rank_or_the_one_behind_is_the_cause_outside_collectives() -> None:
    """The one that is overdue; or one that has been an iteration behind for most of that time."""
    assert find([outside(0), outside(1, found_hung=True)], elapsed_s=10.0).rank == 1
    assert find([outside(0, iteration=6), outside(1, found_hung=True)], elapsed_s=10.0).rank == 0
    assert find([outside(0, iteration=6, quiet_s=1.0), outside(1, found_hung=True)], elapsed_s=10.0).rank == 1
    assert find([outside(0, iteration=6, closing=True), outside(1, found_hung=True)], elapsed_s=10.0).rank == 1
    assert find([outside(0, found_hung=True), outside(1, found_hung=True)], elapsed_s=10.0).candidates == (0, 1)


def test_search_ends_in_any_random_circle_of_waits() -> None:
    chance = random.Random(5)
    for _ in range(300):
        notes = []
        for rank in WORLD:
            groups = {f"/{g}": chance.randrange(4) for g in range(3)}
            group = str(chance.randrange(3))
            flying = (Collective(group=group, seq=groups[f"/{group}"] or 1, op=chance.choice(["a", "b"]), ranks=WORLD),)
            notes.append(
                note(rank, in_flight=flying if chance.random() < 0.8 else (), enqueued=groups, found_hung=rank == 0)
            )
        finding = find(notes, elapsed_s=10.0)
        assert (finding.rank is None) == bool(finding.candidates)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "in train.py:1 step"),
        ({"inner": "queue.py:171 get"}, "in train.py:1 step (queue.py:171 get)"),
        ({"is_busy": True}, "in train.py:1 step, computing"),
        ({"state": "D"}, "in uninterruptible sleep, in train.py:1 step"),
        ({"state": "T"}, "in train.py:1 step"),
        ({"is_saving": True}, "in a checkpoint write, in train.py:1 step"),
        ({"gone": True}, "has ended"),
        ({"has_stack": False, "frame": ""}, "does not answer (no stack could be collected)"),
        (
            {"has_stack": False, "state": "R", "seen_s": 3.2},
            "does not answer (no stack could be collected, process state R), last seen 3 s ago in train.py:1 step",
        ),
        ({"closing": True, "seen_s": 4.4}, "has ended its monitoring, last seen 4 s ago in train.py:1 step"),
        ({"state": "T", "seen_s": None}, "last seen in train.py:1 step"),
        (
            {"raised": "ValueError: x", "inner": "threading.py:8 wait"},
            "in train.py:1 step, has not exited (now in threading.py:8 wait)",
        ),
        ({"raised": "ValueError: x", "gone": True, "frame": ""}, "has ended"),
        ({"waits_in": "barrier"}, "in barrier, in train.py:1 step"),
    ],
)
def test_place_of_a_rank_is_described_in_words(fields: dict[str, Any], words: str) -> None:
    assert place(note(1, **fields)) == words


def test_rank_without_evidence_is_a_candidate_and_its_waiters_are_not_blamed() -> None:
    """0 waits for 2, of another node; 1 for 0."""
    notes = [
        inside(0, group="dp0", ranks=(0, 2), found_hung=True, enqueued={"/tp0": 3}),
        inside(1, group="tp0", ranks=(0, 1), seq=4),
    ]
    finding = find(notes, elapsed_s=10.0)
    assert (finding.rank, finding.candidates) == (None, (2,))
    assert finding.text.endswith("rank 2 (no evidence received)")
    # where somebody is known to be missing, the others needn't be
    assert find([inside(0, found_hung=True), outside(1)], elapsed_s=10.0).rank == 1


def test_rank_does_not_wait_for_itself_and_ranks_that_wait_for_the_same_ones_share_one_set() -> None:
    waits = waits_for([inside(0), inside(1), mute(2), note(3)])
    assert 2 not in waits[2]
    assert waits[0] is waits[1]
    assert waits[0] >= {3}


def test_neighbours_that_meet_wait_for_nobody() -> None:
    def between(rank: int, op: str) -> RankSnapshot:
        return note(rank, in_flight=(Collective(group="pp", seq=3, op=op, ranks=(0, 1), p2p=True),), found_hung=True)

    waits = waits_for([between(0, "send 0->1"), between(1, "recv 1<-0")])
    assert waits == {0: frozenset(), 1: frozenset()}
    # a batch of them names no peer
    assert waits_for([between(0, "coalesced"), note(1)]) == {0: frozenset(), 1: frozenset()}


def test_a_silent_rank_somewhere_in_torch_may_wait_like_the_others() -> None:
    silent = note(3, has_collectives=False, is_in_library=True)
    finding = find([inside(0, found_hung=True), inside(1), inside(2), silent], elapsed_s=10.0)
    assert finding.rank is None


def test_a_single_suspect_that_has_just_moved_is_only_a_candidate() -> None:
    finding = find([inside(0, found_hung=True), outside(1, quiet_s=0.01)], elapsed_s=10.0)
    assert (finding.rank, finding.candidates) == (None, (1,))


@pytest.mark.parametrize("ranks", [(), (3,), (0, 1), tuple(range(0, 9000, 8)), (0, 1, 3), (5, 4, 3), (1, 1, 1)])
def test_large_groups_travel_short(ranks: tuple[int, ...]) -> None:
    one = inside(0, ranks=ranks)
    assert decode(RankSnapshot, encode(one)) == one
    assert len(encode(one)) < 700


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("has_lock", [True, False])
def test_gloo_pipeline_whose_waits_only_stacks_show_names_the_culprit(culprit: int, has_lock: bool) -> None:
    """Found hung first is the one that waits; the other is in Python, or holds its lock."""
    waiting = note(1 - culprit, found_hung=True, is_in_library=True, inner="p2p_communication.py:392 _communicate")
    finding = find([waiting, note(culprit, has_collectives=has_lock)], elapsed_s=10.0)
    assert finding.rank == culprit
    assert finding.text.endswith(f"rank {1 - culprit} waits in p2p_communication.py:392 _communicate")


def test_rank_that_computes_or_saves_in_a_library_does_not_wait() -> None:
    for fields in ({"is_busy": True}, {"is_saving": True}):
        assert find([note(0, found_hung=True, is_in_library=True, **fields), outside(1)], elapsed_s=10.0).rank == 0
    both = [note(0, found_hung=True, is_in_library=True), note(1, is_in_library=True)]
    assert find(both, elapsed_s=10.0).candidates == (0,)


@pytest.mark.parametrize(
    "other",
    [
        {"left_s": 3.0},  # what it does may take longer
        {"left_s": None},
        {"left_s": 0.3, "quiet_s": 0.5},  # an outer section: it moves inside of that
        {"left_s": 0.3, "iteration": 8},  # it has come further
        {"left_s": 0.3, "closing": True},
        {"left_s": 0.3, "gone": True},
    ],
)
def test_a_rank_that_is_not_stuck_as_long_is_no_candidate(other: dict[str, Any]) -> None:
    assert find([note(0, **other), note(1, found_hung=True, left_s=-0.01)], elapsed_s=10.0).rank == 1


def test_ten_candidates_are_all_told() -> None:
    notes = [note(rank, found_hung=rank == 3, left_s=0.0) for rank in range(10) if rank != 8]
    finding = find(notes, elapsed_s=10.0)
    assert finding.candidates == (0, 1, 2, 3, 4, 5, 6, 7, 9)
    assert finding.text.endswith("rank 3 in train.py:3 step; all candidates: ranks 0-7, 9")


def test_rank_that_waits_for_a_dead_process_is_the_cause() -> None:
    lost = (lost_process(77, "pt_data_worker", -9), lost_process(78, "python", 3))
    waiting = note(1, lost=lost, waits_for_process=True)
    finding = find([note(0, found_hung=True), waiting], elapsed_s=10.0)
    assert finding.rank == 1
    words = "its process 77 (pt_data_worker), which was killed by SIGKILL, and 1 more, in train.py:1 step"
    assert finding.text == f"waits for {words}"
    assert decode(RankSnapshot, encode(waiting)) == waiting
    # one that waits for nothing of the kind, or moves, is told of but isn't blamed for that
    idle = note(1, lost=lost)
    assert find([note(0, found_hung=True), idle], elapsed_s=10.0).rank == 0
    assert place(idle) == f"has lost {words}"
    assert (
        find([note(0, found_hung=True), note(1, lost=lost, waits_for_process=True, quiet_s=1.0)], elapsed_s=10.0).rank
        == 0
    )


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("/usr/lib/python3.12/multiprocessing/connection.py", True),
        ("/usr/lib/python3.12/subprocess.py", True),
        ("/site-packages/torch/multiprocessing/spawn.py", True),
        ("/home/me/subprocesses.py", False),
        ("/home/me/multiprocessing/train.py", False),
        ("/home/me/subprocess.py", False),
    ],
)
def test_stack_in_subprocess_or_multiprocessing_waits_for_a_process(file: str, waits: bool) -> None:
    inner, outer = Frame("/usr/lib/python3.12/selectors.py", 415, "select"), Frame("/home/me/train.py", 8, "step")
    assert is_waiting_for_process((inner, Frame(file, 1, "wait"), outer)) is waits


@pytest.mark.parametrize("size", [1, 128])
def test_a_verdict_among_thousands_of_ranks_is_quick_and_their_notes_take_little_room(size: int) -> None:
    """``size`` groups: all ranks wait in one collective, or each in that of its data-parallel group."""
    ranks, culprit = 4096, 2048

    def told(rank: int) -> RankSnapshot:
        group = rank % size
        seq = 99 if rank == culprit else 100
        one = Collective(group=str(group), seq=100, op="all_reduce", ranks=range(group, ranks, size))
        return note(rank, in_flight=() if rank == culprit else (one,), enqueued={f"/{group}": seq}, found_hung=True)

    texts = [json.dumps(to_builtins(told(rank))) for rank in range(ranks)]
    assert max(map(len, texts)) < 700
    notes = [decode(RankSnapshot, text) for text in texts]
    assert all(isinstance(each.ranks, range) for one in notes for each in one.in_flight)
    began_s = time.process_time()
    finding = find(notes, elapsed_s=10.0)
    assert finding.rank == culprit
    assert time.process_time() - began_s < 5.0  # of this process alone; 0.1 s, and it was 26 s


def test_a_circle_of_thousands_has_no_single_cause_and_is_soon_over() -> None:
    def sends(rank: int) -> RankSnapshot:
        pair = (rank, (rank + 1) % 5000)
        one = Collective(group=f"p{rank}", seq=1, op="send 0->1", ranks=pair, p2p=True)
        return note(rank, in_flight=(one,), found_hung=rank == 3)

    finding = find([sends(rank) for rank in range(5000)], elapsed_s=10.0)
    assert finding.rank is None
    assert len(finding.candidates) == 5000


@pytest.mark.parametrize(
    ("file", "is_library"),
    [
        ("/v/lib/python3.11/site-packages/torch/autograd/graph.py", True),
        ("/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", True),
        ("/v/lib/python3.11/site-packages/megatron/core/pipeline_parallel/p2p_communication.py", True),
        ("/v/lib/python3.11/site-packages/megatron/energon/loader.py", True),
        ("/opt/pytorch/torch/distributed/distributed_c10d.py", True),
        ("/opt/pytorch/torch/nn/modules/module.py", True),
        ("/opt/Megatron-LM/megatron/core/pipeline_parallel/p2p_communication.py", True),
        ("/home/me/megatron/megatron/core/parallel_state.py", True),
        ("/opt/Megatron-LM/megatron/training/training.py", True),
        ("/opt/Bridge/src/megatron/bridge/training/train.py", True),
        ("/home/me/megatron/cases.py", False),
        ("/home/me/megatron/training/my_loader.py", False),
        ("/home/me/megatron/core/cases.py", False),
        ("/home/me/megatron/scripts/utils.py", False),
        ("/home/me/torch/train.py", False),
        ("/home/me/torch/utils/loader.py", False),
        ("/home/me/torch/distributed/train.py", False),
        ("/home/torch/megatron/train.py", False),
        # what is installed below a directory of the user's of that name
        ("/home/me/megatron/core/utils.py/v/lib/python3.11/site-packages/webdataset/pipeline.py", False),
        ("/home/me/megatron/v/lib/python3.11/site-packages/datasets/torch/x.py", False),
    ],
)
def test_library_is_known_by_where_it_is_installed_not_by_a_directorys_name(file: str, is_library: bool) -> None:
    stack = [Frame(file, 1, "f"), Frame("/home/me/megatron/torch/train.py", 2, "main")]
    assert is_in_library(stack) is is_library
    assert is_in_library(stack[:1]) is is_library
    assert not is_in_library(stack[1:])
    assert not is_in_library([])


@pytest.mark.parametrize(
    ("file", "script", "is_library"),
    [
        ("/opt/lm/megatron/training/new_in_this_version.py", "/opt/lm/pretrain_gpt.py", True),
        ("/home/me/megatron/megatron/core/new/x.py", "/home/me/megatron/pretrain_gpt.py", True),
        ("/home/me/megatron/training/loader.py", "/home/me/megatron/train.py", False),
        ("/home/me/megatron/core/cases.py", "/home/me/megatron/core/cases.py", False),
        ("/home/me/megatron/loader.py", "/home/me/train.py", False),
        ("/opt/lm/megatron/training/new_in_this_version.py", "pretrain_gpt.py", False),  # its directory isn't known
    ],
)
def test_package_of_megatron_is_one_that_its_script_is_not_in(file: str, script: str, is_library: bool) -> None:
    assert is_in_library([Frame(file, 1, "f"), Frame("<frozen runpy>", 1, "g"), Frame(script, 2, "h")]) is is_library


def test_rank_that_has_ended_its_monitoring_is_missing_from_a_collective_even_inside_a_library() -> None:
    leaving = outside(2, closing=True, is_in_library=True, has_collectives=False)
    finding = find([inside(0, found_hung=True), inside(1), leaving], elapsed_s=10.0)
    assert finding.rank == 2


def test_numbers_that_ranks_have_given_themselves_stand_for_ranks_of_the_job() -> None:
    """Rank 1 is gone, and the others have restarted within their processes: rank 2 calls itself 1, rank 3 is 2."""
    group = (0, 1, 2)

    def renumbered(rank: int, own_rank: int | None) -> RankSnapshot:
        entered = Collective(group="0", seq=7, op="all_reduce", ranks=group, backend="gloo")
        return replace(inside(rank), own_rank=own_rank, in_flight=(entered,), enqueued={"gloo/0": 7})

    stuck = replace(outside(3), own_rank=2, enqueued={"gloo/0": 6})
    finding = find([renumbered(0, None), RankSnapshot(rank=1, gone=True), renumbered(2, 1), stuck], elapsed_s=10.0)
    assert (finding.rank, finding.text.endswith("; 2 others wait in all_reduce #7")) == (3, True)
