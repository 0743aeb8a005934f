"""Who hangs and who waits for it. Pure."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collective
from megatron_ft.diagnosis.rank_snapshot import (
    RankSnapshot,
    is_in_library,
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


def paired(rank: int, op: str, *, ranks: tuple[int, ...] = (0, 1)) -> RankSnapshot:
    """A rank that waits for its neighbour in a pipeline."""
    one = Collective(group="pp", seq=3, op=op, ranks=ranks, p2p=True)
    return note(rank, in_flight=(one,), found_hung=True)


def outside(rank: int, *, seq: int = 5, **fields: Any) -> RankSnapshot:
    """A rank that hasn't entered what the others wait in."""
    return note(rank, **{"enqueued": {"/0": seq}, **fields})


def mute(rank: int) -> RankSnapshot:
    """A rank that lives and whose threads don't answer: it holds the GIL."""
    return RankSnapshot(rank=rank, state="R", is_busy=True)


def unseen(rank: int) -> RankSnapshot:
    """A rank that was found hung, and ended before anything was told of it."""
    return RankSnapshot(rank=rank, iteration=7, found_hung=True)


HANDLING = "ValueError: sample 17 is broken, in train.py:13 step"
CLOSING = inside(1, group="1", seq=1, op="barrier", ranks=(0, 1), handling=HANDLING)
PAIR, HUNG, WAITS = inside(0, ranks=(0, 1)), note(1, found_hung=True), inside(0, found_hung=True)
BLIND = {"has_collectives": False, "waits_in": "all_reduce", "found_hung": True}
ODD = {"group": "9", "seq": 1, "op": "barrier", "enqueued": {"/0": 5}}
MINE, THEIRS = "ValueError: the batch is empty", "RuntimeError: gloo: connection closed by peer"
RAISED, VICTIM = note(2, raised=MINE, raised_s=0.7, waits_in="barrier"), note(1, found_hung=True, raised=THEIRS)
CHAIN = [
    inside(0, group="dp0", ranks=(0, 2), seq=4, found_hung=True),
    inside(1, group="dp1", ranks=(1, 3), seq=4),
    inside(2, group="tp1", ranks=(2, 3), seq=8, enqueued={"/dp0": 3}),
    note(3, enqueued={"/tp1": 7, "/dp1": 3}),
]
"""Tensor pairs (0, 1), (2, 3), data pairs (0, 2), (1, 3): 3 hangs, 2 waits for it, 0 for 2, 1 for 3 or 0."""
PIPELINE = [note(0), *(paired(rank, f"recv {rank}<-{rank - 1}", ranks=(0, 1, 2)) for rank in (1, 2))]
LOST = lost_process(77, "pt_data_worker", -9), lost_process(78, "python", 3)
DEAD = "its process 77 (pt_data_worker), which was killed by SIGKILL, and 1 more, in train.py:1 step"
IDLE = {"found_hung": True, "is_in_library": True, "inner": "p2p_communication.py:392 _communicate"}


@pytest.mark.parametrize(
    ("notes", "rank", "text"),
    [
        # alone, because the other nodes can't be asked
        ([HUNG], 1, "in train.py:1 step"),
        ([inside(1, ranks=(1,), found_hung=True)], 1, "in all_reduce #6"),
        # its interpreter may take long to end of an exception, or wait for ever in a destructor
        ([inside(0), VICTIM, RAISED, inside(3)], 2, "in train.py:2 step, has not exited; "),
        ([note(1, raised="ValueError: a", raised_s=0.5), RAISED, inside(3)], 2, ""),  # the first one of two
        ([inside(0), VICTIM, replace(RAISED, raised=THEIRS), inside(3)], None, ""),  # all have only lost a peer
        ([inside(0, ranks=(), found_hung=True), VICTIM], None, ""),  # who it has lost may be on another node
        # a rank that waits for a waiting rank is no cause, in collectives or in a pipeline
        (CHAIN, 3, ""),
        (PIPELINE, 0, "; 2 others wait in recv 1<-0 #3 of group pp and other collectives"),
        # a process of its own has died; one that waits for nothing of the kind, or moves, isn't blamed for that
        ([note(0, found_hung=True), note(1, lost=LOST, waits_for_process=True)], 1, f"waits for {DEAD}"),
        ([note(0, found_hung=True), note(1, lost=LOST)], 0, ""),
        ([note(0, found_hung=True), note(1, lost=LOST, waits_for_process=True, quiet_s=1.0)], 0, ""),
        # an exception that is being handled decides where collectives don't
        ([PAIR, replace(CLOSING, handling="")], None, "candidates: rank 0 in all_reduce"),
        ([PAIR, CLOSING], 1, f"raised {HANDLING}, then waits in barrier #1 of group 1, in train.py:1 step; "),
        ([replace(PAIR, handling=HANDLING), CLOSING], None, HANDLING),
        ([PAIR, replace(CLOSING, handling="RuntimeError: gloo: Connection closed by peer")], None, ""),
        ([replace(WAITS, handling=HANDLING), inside(1), outside(2), inside(3)], 2, "3 others wait in all_reduce #6"),
        # some rank doesn't answer
        ([WAITS, outside(1), mute(2), inside(3)], 1, ""),
        ([WAITS, inside(1), inside(2), note(3, has_collectives=False)], 3, "holding the GIL"),
        ([WAITS, inside(1), inside(2), note(3, has_collectives=False, is_in_library=True)], None, ""),
        # by their stacks alone
        ([note(0, **BLIND), note(1, **BLIND), note(3, has_collectives=False)], 3, "2 others wait in all_reduce"),
        ([note(0, **BLIND), note(1, **BLIND), note(3, has_collectives=False, waits_in="barrier")], None, ""),
        ([note(0), note(1, **IDLE)], 0, "rank 1 waits in p2p_communication.py:392 _communicate"),
        ([note(0, **IDLE, is_busy=True), outside(1)], 0, ""),
        ([note(0, **IDLE, is_saving=True), outside(1)], 0, ""),
        # a rank has left
        ([WAITS, inside(1), note(2, gone=True, has_collectives=False)], 2, "has ended; 2 others wait"),
        ([WAITS, inside(1), outside(2, closing=True)], 2, "has ended its monitoring"),
        ([WAITS, inside(1), outside(2, closing=True, is_in_library=True, has_collectives=False)], 2, ""),
        # everybody waits for somebody; only the wait of the odd one explains all the others
        ([inside(0, **ODD), inside(1), inside(2), inside(3)], 0, "in barrier #1 of group 9"),
        # a process is stopped, or stuck in the kernel
        ([outside(0, found_hung=True), outside(1), note(3, state="T", has_collectives=False)], 3, ""),
        ([outside(0, found_hung=True), outside(1), note(3, state="D", has_collectives=False)], 3, "uninterruptible"),
        # outside of collectives it is the overdue one, or one that has been an iteration behind for most of that time
        ([outside(0), HUNG], 1, ""),
        ([outside(0, iteration=6), HUNG], 0, ""),
        ([outside(0, iteration=6, quiet_s=1.0), HUNG], 1, ""),
        ([outside(0, iteration=6, closing=True), HUNG], 1, ""),
        # of several that are missing one is an iteration behind
        ([WAITS, inside(1), outside(2), outside(3, iteration=6)], 3, ""),
        # a rank of which nothing was seen may have waited for one that was
        ([unseen(0), inside(1), inside(2), outside(3)], 3, "; 2 others wait in all_reduce #6"),
        ([unseen(0), outside(1, quiet_s=1.0)], 0, ""),
        ([unseen(0), outside(1, iteration=6)], 1, ""),
        # a rank isn't stuck for as long as the one that was found
        ([note(0, left_s=3.0), HUNG], 1, ""),
        ([note(0, left_s=0.3, quiet_s=0.5), HUNG], 1, ""),  # an outer section: it moves inside of that
        ([note(0, left_s=0.3, iteration=8), HUNG], 1, ""),
        ([note(0, left_s=0.3, closing=True), HUNG], 1, ""),
    ],
)
def test_rank_is_accused_where_the_evidence_on_all_ranks_shows_it(
    notes: list[RankSnapshot], rank: int | None, text: str
) -> None:
    finding = find(notes, elapsed_s=10.0)
    assert finding.rank == rank
    assert text in finding.text


TEN = [note(rank, found_hung=rank == 3, left_s=0.0) for rank in range(10) if rank != 8]
ELSEWHERE = inside(0, group="dp0", ranks=(0, 2), found_hung=True, enqueued={"/tp0": 3})


@pytest.mark.parametrize(
    ("notes", "are_all", "candidates", "text"),
    [
        ([inside(1, found_hung=True)], False, (0, 2, 3), "(no evidence received)"),
        ([note(1, **BLIND)], False, (1,), ""),
        ([note(1, waits_in="all_reduce")], False, (), "root cause undetermined"),
        ([PAIR, inside(1, **{**ODD, "ranks": (0, 1)})], True, (0, 1), ""),  # they wait for each other
        ([outside(0, found_hung=True), HUNG], True, (0, 1), ""),
        ([ELSEWHERE, inside(1, group="tp0", ranks=(0, 1), seq=4)], True, (2,), "rank 2 (no evidence received)"),
        ([inside(0), inside(1), mute(2), inside(3)], True, (2,), "(no stack could be collected, process state R)"),
        ([inside(0), mute(1), mute(2), inside(3)], True, (), ""),
        ([WAITS, inside(1), outside(2), outside(3)], True, (2, 3), ""),
        ([WAITS, outside(1, quiet_s=0.01)], True, (1,), ""),  # the only one, but it has just moved
        ([unseen(0), outside(1)], True, (0, 1), ""),
        ([note(0, **IDLE), note(1, is_in_library=True)], True, (0,), ""),
        (TEN, True, (0, 1, 2, 3, 4, 5, 6, 7, 9), "rank 3 in train.py:3 step; all candidates: ranks 0-7, 9"),
    ],
)
def test_candidates_are_told_where_the_evidence_does_not_decide(
    notes: list[RankSnapshot], are_all: bool, candidates: tuple[int, ...], text: str
) -> None:
    finding = find(notes, elapsed_s=10.0, are_all=are_all)
    assert (finding.rank, finding.candidates) == (None, candidates)
    assert finding.text.endswith(text)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "in train.py:1 step"),
        ({"inner": "queue.py:171 get"}, "in train.py:1 step (queue.py:171 get)"),
        ({"state": "D"}, "in uninterruptible sleep, in train.py:1 step"),
        ({"is_saving": True}, "in a checkpoint write, in train.py:1 step"),
        ({"has_stack": False, "frame": ""}, "does not answer (no stack could be collected)"),
        (
            {"has_stack": False, "state": "R", "seen_s": 3.2},
            "does not answer (no stack could be collected, process state R), last seen 3 s ago in train.py:1 step",
        ),
        ({"closing": True, "seen_s": 4.4}, "has ended its monitoring, last seen 4 s ago in train.py:1 step"),
        (
            {"raised": "ValueError: x", "inner": "threading.py:8 wait"},
            "in train.py:1 step, has not exited (now in threading.py:8 wait)",
        ),
        ({"raised": "ValueError: x", "gone": True, "frame": ""}, "has ended"),
        ({"waits_in": "barrier"}, "in barrier, in train.py:1 step"),
        ({"lost": LOST}, f"has lost {DEAD}"),
    ],
)
def test_place_of_a_rank_is_described_in_words(fields: dict[str, Any], words: str) -> None:
    assert place(note(1, **fields)) == words


def test_neighbours_that_meet_wait_for_nobody() -> None:
    waits = waits_for([paired(0, "send 0->1"), paired(1, "recv 1<-0")])
    assert waits == {0: frozenset(), 1: frozenset()}
    # a batch of them names no peer
    assert waits_for([paired(0, "coalesced"), note(1)]) == {0: frozenset(), 1: frozenset()}


@pytest.mark.parametrize("ranks", [(), (3,), (0, 1), tuple(range(0, 9000, 8)), (0, 1, 3), (5, 4, 3), (1, 1, 1)])
def test_snapshot_is_read_as_it_was_sent_and_large_groups_travel_short(ranks: tuple[int, ...]) -> None:
    one = inside(0, ranks=ranks, lost=LOST, raised=MINE)
    assert decode(RankSnapshot, encode(one)) == one
    assert len(encode(one)) < 900


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
        ("/v/lib/python3.11/site-packages/megatron/core/pipeline_parallel/p2p_communication.py", True),
        ("/opt/pytorch/torch/distributed/distributed_c10d.py", True),
        ("/opt/Megatron-LM/megatron/core/pipeline_parallel/p2p_communication.py", True),
        ("/home/me/megatron/megatron/core/parallel_state.py", True),
        ("/opt/Bridge/src/megatron/bridge/training/train.py", True),
        ("/home/me/megatron/cases.py", False),
        ("/home/me/megatron/training/my_loader.py", False),
        ("/home/me/torch/train.py", False),
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
    # a package that a script elsewhere has imported is one, too; not where the script's directory isn't known
    new = Frame("/opt/lm/megatron/training/new_in_this_version.py", 1, "f")
    assert is_in_library([new, Frame("/opt/lm/pretrain_gpt.py", 2, "main")])
    assert not is_in_library([new, Frame("pretrain_gpt.py", 2, "main")])


def test_numbers_that_ranks_have_given_themselves_stand_for_ranks_of_the_job() -> None:
    """Rank 1 is gone, and the others have restarted within their processes: rank 2 calls itself 1, rank 3 is 2."""
    group = (0, 1, 2)

    def renumbered(rank: int, own_rank: int | None) -> RankSnapshot:
        entered = Collective(group="0", seq=7, op="all_reduce", ranks=group, backend="gloo")
        return replace(inside(rank), own_rank=own_rank, in_flight=(entered,), enqueued={"gloo/0": 7})

    stuck = replace(outside(3), own_rank=2, enqueued={"gloo/0": 6})
    finding = find([renumbered(0, None), RankSnapshot(rank=1, gone=True), renumbered(2, 1), stuck], elapsed_s=10.0)
    assert (finding.rank, finding.text.endswith("; 2 others wait in all_reduce #7")) == (3, True)
