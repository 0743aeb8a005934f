"""The board: what is written is what is read; what can't be right isn't read."""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from megatron_ft.errors import RankMonitorClientError
from megatron_ft.learning.timeouts import HeartbeatTimeouts, SectionTimeouts
from megatron_ft.link.base import layout as layout
from megatron_ft.link.base.layout import ArmedTimeout, BoardDamagedError, BoardSnapshot
from megatron_ft.link.board import Board, create_memory
from megatron_ft.rank.base import say, user_code
from megatron_ft.rank.client import recorder as recorder_module
from megatron_ft.rank.client.recorder import Recorder
from tests.support.boards import new_board
from tests.support.clock import Clock, clock

__all__ = ["clock"]

SECTIONS = {"setup": 600.0, "step": 1.5, "ckpt": None}


@pytest.fixture
def board() -> Iterator[Board]:
    facts = {"cycle": 3, "rank": 7, "pid": 42, "warmup_iterations": 2}
    board = new_board(**facts, initial_heartbeat=10.0, sections=SECTIONS, out_of_section=0.25)
    yield board
    board.close()


@pytest.fixture
def recorder(board: Board, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(user_code, "reports_iterations", False)
    return Recorder(board, SectionTimeouts(dict(SECTIONS), 0.25))


def test_board_memory_is_allocated_before_it_is_handed_out() -> None:
    fd = create_memory()
    assert os.fstat(fd).st_blocks * 512 >= layout.BOARD_BYTES
    os.close(fd)


def test_the_second_step_says_that_a_rank_trains_where_no_iterations_are_told(board: Board, recorder: Recorder) -> None:
    recorder.start("setup")
    recorder.end("setup")
    before = time.monotonic_ns()
    recorder.start("step")
    began = time.monotonic_ns()
    recorder.end("step")
    # an exception ends the first one, too: then the rank never trains
    assert board.snapshot().first_step_at_ns == 0
    recorder.start("step")
    recorder.end("step")
    recorder.start("step")
    snapshot = board.snapshot()
    assert before <= snapshot.first_iteration_at_ns <= began <= snapshot.first_step_at_ns
    assert snapshot.first_iteration is None
    third_began = snapshot.sections[1].opened_at_ns
    assert snapshot.first_step_at_ns < third_began


def test_sections_iterations_and_heartbeats_show_on_the_board(board: Board, recorder: Recorder) -> None:
    before = time.monotonic_ns()
    recorder.iteration(4)
    recorder.start("step")
    recorder.start("ckpt")
    recorder.heartbeat()
    snapshot = board.snapshot()
    assert (snapshot.cycle, snapshot.rank, snapshot.pid) == (3, 7, 42)
    assert [s.name for s in snapshot.open_sections] == ["step", "ckpt"]
    assert snapshot.iteration == snapshot.first_iteration == 4
    assert before <= snapshot.first_iteration_at_ns <= snapshot.last_transition_ns <= snapshot.last_heartbeat_ns
    assert (snapshot.iterations_seen, snapshot.heartbeats) == (1, 1)
    recorder.end("ckpt")
    recorder.end("step")
    recorder.iteration(5)
    recorder.iteration(5)
    snapshot = board.snapshot()
    assert snapshot.open_sections == ()
    assert (snapshot.iteration, snapshot.first_iteration, snapshot.iterations_seen) == (5, 4, 2)
    events = list(layout.ring_events(board.ring_words(0, snapshot.ring_head)[1]))
    assert [kind for _, kind, _, _ in events] == [4, 1, 1, 3, 2, 2, 4]
    assert [value for _, kind, _, value in events if kind == layout.EVENT_ITERATION] == [4, 5]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([("start", "step"), ("start", "step")], "'step' is already open"),
        ([("end", "step")], "'step' is already closed"),
        ([("start", "step"), ("end", "step"), ("end", "step")], "'step' is already closed"),
        ([("iteration", -1)], "negative"),
    ],
)
def test_calls_that_make_no_sense_are_refused_and_change_nothing(
    recorder: Recorder, board: Board, calls: list[tuple[str, object]], message: str
) -> None:
    for name, argument in calls[:-1]:
        getattr(recorder, name)(argument)
    before = board.snapshot()
    name, argument = calls[-1]
    with pytest.raises(RankMonitorClientError, match=message):
        getattr(recorder, name)(argument)
    assert board.snapshot() == before


def test_a_section_that_is_not_configured_is_skipped_and_told_of_once(
    recorder: Recorder, board: Board, capsys: pytest.CaptureFixture[str]
) -> None:
    say.forget()
    before = board.snapshot()
    for call in (recorder.start, recorder.start, recorder.end, recorder.end):
        call("nope")
    assert board.snapshot() == before
    warnings = capsys.readouterr().err
    assert warnings.count("section 'nope' is not configured, and is skipped") == 1
    assert "configured sections: 'setup', 'step', 'ckpt'" in warnings


def test_longest_ended_interval_of_each_kind_is_told_apart_from_open_ones(clock: Clock, recorder: Recorder) -> None:
    """The way from the last section to the end of a run never ends, and the next run would die on it."""
    assert (set(recorder.observed().values()), recorder.open_ages().keys()) == ({-1}, {"out_of_section"})
    clock.pass_s(1.0)
    recorder.start("step")
    clock.pass_s(2.0)
    assert recorder.observed()["step"] == -1
    assert recorder.open_ages().keys() == {"step"}
    assert recorder.open_ages()["step"] >= 2_000_000_000
    recorder.end("step")
    recorder.start("step")
    recorder.end("step")
    clock.pass_s(3.0)
    observed = recorder.observed()
    assert observed["step"] >= 2_000_000_000
    assert 1_000_000_000 <= observed["out_of_section"] < 2_000_000_000
    assert observed["ckpt"] == -1
    assert recorder.open_ages()["out_of_section"] >= 3_000_000_000
    assert recorder.initial_heartbeat == recorder.longest_heartbeat == -1
    recorder.heartbeat()
    assert recorder.initial_heartbeat >= 6_000_000_000
    assert recorder.longest_heartbeat == -1
    recorder.heartbeat()
    assert 0 <= recorder.longest_heartbeat < recorder.initial_heartbeat


def test_added_sections_fill_the_table_and_one_more_is_refused(board: Board, recorder: Recorder) -> None:
    for number in range(layout.MAX_SECTIONS - len(SECTIONS)):
        recorder.add_section(f"more-{number}")
    with pytest.raises(ValueError, match="at most 72"):
        recorder.add_section("one too many")
    assert len(board.snapshot().sections) == layout.MAX_SECTIONS


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (layout.W_MAGIC, 1),
        (layout.W_START, 0),
        (layout.W_LAST_TRANSITION, 1),
        (layout.W_LAST_HEARTBEAT, 2**64 - 1),
        (layout.W_SECTION_COUNT, layout.MAX_SECTIONS + 1),
        (layout.W_OUT_OF_SECTION_TIMEOUT, 0),
        (layout.W_CLOSING, 2),
        (layout.slot(1) + layout.S_OPENED_AT, 2**62),
        (layout.slot(1) + layout.S_TIMEOUT, 0),
        (layout.W_COLLECTIVES_SEEN_AT, 5),
        (layout.W_LOOKS, 2**60),
        (layout.slot(1), 0xFFFFFFFFFFFFFFFF),
        *(
            (word, 2**60)
            for word in (layout.W_STEPS, layout.W_SAVES, layout.W_ITERATIONS_BACK, layout.W_LEARNING_FACTS)
        ),
    ],
)
def test_a_word_that_cannot_be_right_makes_the_board_invalid(board: Board, word: int, value: int) -> None:
    board.snapshot()
    board.words[word] = value
    with pytest.raises(BoardDamagedError):
        board.snapshot()


def test_a_calculation_restarts_the_idle_time(clock: Clock, board: Board, recorder: Recorder) -> None:
    recorder.heartbeat()
    recorder.start("step")
    recorder.end("step")
    clock.pass_s(7.0)
    before = recorder_module.monotonic_ns()
    recorder.restart_clocks()
    assert board.snapshot().last_transition_ns >= before
    assert board.snapshot().last_heartbeat_ns >= before
    clock.pass_s(2.0)
    assert recorder.open_ages()["out_of_section"] // 10**9 == 2
    assert recorder.observed()["out_of_section"] // 10**9 == 7, "the idle time before it is remembered"
    recorder.start("step")
    stamp = board.snapshot().last_transition_ns
    recorder.restart_clocks()
    assert board.snapshot().last_transition_ns == stamp


def test_hooks_do_not_fail_on_a_board_that_was_written_over(board: Board, recorder: Recorder) -> None:
    """A count that is all ones has no next number; a rank must not end because of it."""
    numbers = itertools.count()
    hooks = [
        lambda: recorder.iteration(next(numbers)),
        lambda: recorder.start("step"),
        recorder.heartbeat,
        lambda: recorder.end("step"),
        lambda: recorder.write_timeouts(SectionTimeouts(dict(SECTIONS), 0.25), HeartbeatTimeouts()),
        lambda: recorder.add_section(f"more {next(numbers)}"),
    ]
    for fill in (2**64 - 1, 2**64 - 2, 2**63):
        for hook in hooks:
            for word in range(layout.RING):
                board.words[word] = fill
            hook()


class Interrupted(Exception):
    """What a signal handler raises."""


def interrupted(call: Callable[[], None], at: int, handler: Callable[[], None]) -> bool:
    """Make a call in which a signal is handled before its line or instruction ``at``; False if it has fewer.

    Python 3.12 tells of lines only.
    """
    passed = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Callable[..., Any] | None:
        nonlocal passed
        if frame.f_code.co_filename != recorder_module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event in ("line", "opcode"):
            passed += 1
            if passed == at:
                sys.settrace(None)
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return passed >= at


def close_all(recorder: Recorder) -> None:
    for section in reversed(recorder.open_sections):
        recorder.end(section)


@pytest.mark.parametrize(("closes", "raises"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("what", ["start", "end"])
def test_a_signal_handler_that_closes_all_or_raises_leaves_nothing_open_that_cannot_be_closed(
    board: Board, recorder: Recorder, what: str, closes: bool, raises: bool
) -> None:
    def handler() -> None:
        if closes:
            close_all(recorder)
        if raises:
            raise Interrupted

    call = functools.partial(getattr(recorder, what), "step")
    for at in itertools.count(1):
        if what == "end":
            recorder.start("step")
        has_raised = was_interrupted = False
        try:
            was_interrupted = interrupted(call, at, handler)
        except (Interrupted, RankMonitorClientError):  # the latter: it was closed before this could do it
            has_raised = was_interrupted = True
        if closes:
            assert [section.name for section in board.snapshot().open_sections] == recorder.open_sections, at
            assert recorder.open_sections == [] or (what == "start" and not has_raised), at
        close_all(recorder)
        assert board.snapshot().open_sections == (), at
        if not was_interrupted:
            assert at > 10
            break


def test_the_end_of_the_warm_up_is_stamped(board: Board, recorder: Recorder) -> None:
    """Two iterations are the warm-up here, and each is told as it begins."""
    for number in (7, 8):
        recorder.iteration(number)
        assert board.snapshot().warm_up_over_ns == 0
    before = time.monotonic_ns()
    recorder.iteration(9)
    over = board.snapshot().warm_up_over_ns
    assert before <= over <= time.monotonic_ns()
    recorder.iteration(10)
    assert board.snapshot().warm_up_over_ns == over


def test_counts_of_collectives_are_there_once_they_were_read(board: Board) -> None:
    assert board.snapshot().collectives is None
    now_ns = time.monotonic_ns()
    words = {layout.W_COLLECTIVE_AT: now_ns, layout.W_COLLECTIVES_ENTERED: 9, layout.W_COLLECTIVES_COMPLETED: 8}
    for word, value in words.items():
        board.words[word] = value
    assert board.snapshot().collectives is None, "it isn't known yet that there is a process group"
    board.words[layout.W_COLLECTIVES_SEEN_AT] = now_ns
    assert board.snapshot().collectives == (now_ns, now_ns, 9, 8, None, 0, 0, 0)
    for word, value in {layout.W_LOOKS: 7, layout.W_LOOKS_WAITING: 5, layout.W_WAITS: 2}.items():
        board.words[word] = value
    assert board.snapshot().collectives == (now_ns, now_ns, 9, 8, None, 7, 5, 2)
    board.words[layout.W_COLLECTIVE_AT] = 7
    with pytest.raises(BoardDamagedError, match="W_COLLECTIVE_AT is 0x7"):
        board.snapshot()


def armed(board: Board) -> BoardSnapshot:
    sections = tuple(each._replace(armed=ArmedTimeout(5, enforced=False)) for each in board.snapshot().sections)
    return board.snapshot()._replace(
        sections=sections, armed_out_of_section=ArmedTimeout(8), armed_heartbeat_ns=9, armed_initial_heartbeat_ns=10
    )


def test_armed_timeouts_are_in_force_and_the_own_ones_are_kept(board: Board) -> None:
    wanted = armed(board)
    board.put_armed(wanted)
    shown = board.snapshot()
    assert shown == wanted
    assert [each.timeout_ns for each in shown.sections] == [5, 5, 5]
    assert (shown.out_of_section_timeout_ns, shown.heartbeat_timeout_ns, shown.initial_heartbeat_timeout_ns) == (
        8,
        9,
        10,
    )
    assert [each.own_timeout_ns for each in shown.sections] == [600_000_000_000, 1_500_000_000, None]
    assert shown.own_out_of_section_timeout_ns == 250_000_000
    board.put_section(1, "step", 3.0)
    step = board.snapshot().sections[1]
    assert (step.own_timeout_ns, step.timeout_ns) == (3_000_000_000, 5), "the rank's own words are others"


@pytest.mark.parametrize("since", [0, 100, layout.RING_EVENTS - 1, layout.RING_EVENTS, layout.RING_EVENTS + 50])
def test_ring_words_are_those_of_the_events_that_are_still_there(board: Board, recorder: Recorder, since: int) -> None:
    for number in range(layout.RING_EVENTS + 100):
        recorder.iteration(number)
    head = board.snapshot().ring_head
    first, words = board.ring_words(since, head)
    # the oldest one may be overwritten at any moment
    assert first == max(since, 101)
    assert [code & layout.VALUE_MASK for code in words[1::2]] == list(range(first, head))
    assert board.ring_words(head, head) == (head, [])


def test_ring_words_leave_out_what_was_overwritten_since_the_snapshot(board: Board, recorder: Recorder) -> None:
    for number in range(50):
        recorder.iteration(number)
    head = board.snapshot().ring_head
    for number in range(50, layout.RING_EVENTS + 20):
        recorder.iteration(number)
    first, words = board.ring_words(0, head)
    assert first == 21
    assert [code & layout.VALUE_MASK for code in words[1::2]] == list(range(21, 50))
    for number in range(layout.RING_EVENTS + 20, layout.RING_EVENTS + 90):
        recorder.iteration(number)
    assert board.ring_words(0, head) == (head, [])
