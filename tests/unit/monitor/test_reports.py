"""The last section events of a rank go from its ring into the event log: each once; earlier ones are counted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import accumulate

import pytest

from megatron_ft.core.board import layout as layout
from megatron_ft.core.facts.monitor import Progress
from megatron_ft.ipc.board import Board, BoardTimeouts, create_memory
from megatron_ft.learning.timeouts import SectionTimeouts
from megatron_ft.monitor.reports import _MOST_EVENTS, last_events
from megatron_ft.rank.client.recorder import Recorder

SECTIONS: dict[str, float | None] = {"setup": 600.0, "step": 1.5}
START, END, BEAT, ITERATION = (kind << 8 for kind in (1, 2, 3, 4))


@pytest.fixture
def board() -> Iterator[Board]:
    fd = create_memory()
    board = Board(fd)
    os.close(fd)
    timeouts = BoardTimeouts(None, None, SECTIONS, None)
    board.initialise(cycle=0, rank=0, pid=1, start_ns=time.monotonic_ns(), warmup_iterations=0, timeouts=timeouts)
    yield board
    board.close()


@pytest.fixture
def recorder(board: Board) -> Recorder:
    return Recorder(board, SectionTimeouts(dict(SECTIONS), None))


def take(board: Board) -> Progress | None:
    return last_events(board, board.snapshot(), time.monotonic_ns())


def iterations(batch: Progress | None) -> list[int]:
    return [] if batch is None else batch.iterations


def test_a_batch_says_what_the_rank_did_and_when(board: Board, recorder: Recorder) -> None:
    before = time.monotonic_ns()
    recorder.iteration(41)
    recorder.start("step")
    recorder.heartbeat()
    recorder.end("step")
    after = time.monotonic_ns()
    batch = take(board)
    assert batch is not None
    assert batch.names == ("setup", "step")
    assert batch.code == [ITERATION, START | 1, BEAT, END | 1]
    assert batch.iterations == [41]
    assert batch.skipped == 0
    ends_ns = [batch.from_ns + 1000 * us for us in accumulate(batch.dt_us)]
    assert before <= ends_ns[0]
    assert ends_ns == sorted(ends_ns)
    assert ends_ns[-1] <= after
    assert take(board) is None


def test_event_is_in_exactly_one_batch_whichever_monitor_takes_it(board: Board, recorder: Recorder) -> None:
    """What was taken stands on the board."""
    seen = []
    for number in range(50):
        recorder.iteration(number)
        if number % 7 == 0:
            seen += iterations(take(board))
    seen += iterations(take(board))
    assert seen == list(range(50))


def test_only_the_last_events_are_taken(board: Board, recorder: Recorder) -> None:
    for number in range(layout.RING_EVENTS + 100):
        recorder.iteration(number)
    batch = take(board)
    assert batch is not None
    assert batch.skipped == layout.RING_EVENTS + 100 - _MOST_EVENTS
    assert batch.iterations == list(range(batch.skipped, layout.RING_EVENTS + 100))


def test_damaged_ring_is_not_logged_and_its_events_count_as_lost(board: Board, recorder: Recorder) -> None:
    recorder.iteration(1)
    recorder.iteration(2)
    board.words[layout.RING] = 5  # long before the start of monitoring
    board.words[layout.RING + 3] = 0xFFFF << layout.SECTION_SHIFT  # no kind of event
    damaged = take(board)
    assert damaged is not None
    assert (damaged.code, damaged.skipped) == ([], 2)
    recorder.iteration(3)
    batch = take(board)
    assert batch is not None
    assert batch.iterations == [3]
