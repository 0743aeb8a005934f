"""A monitor's eye on one board: what it takes for damage, and that damage hides no hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from megatron_ft.core.board import layout as layout
from megatron_ft.core.board.hang_detector import CheckAction
from megatron_ft.core.board.intervals import HangKind, running_intervals
from megatron_ft.core.timeouts.exchange import Arm, Armed
from megatron_ft.core.timeouts.in_force import HeartbeatTimeouts, SectionTimeouts
from megatron_ft.ipc.config.yaml_file import FaultToleranceConfig
from megatron_ft.monitor.watched_rank import WatchedRank
from megatron_ft.rank.client.recorder import Recorder
from tests.support.clock import Clock, clock

__all__ = ["clock"]

S = 1_000_000_000
TIMEOUTS = {"step": 0.3, "checkpointing": 30.0}


def watch(timeouts: dict[str, float], out_of_section: float | None) -> WatchedRank:
    config = FaultToleranceConfig(rank_section_timeouts=timeouts, rank_out_of_section_timeout=out_of_section)
    pidfd = os.pidfd_open(os.getpid())
    return WatchedRank.attach(config, pid=os.getpid(), pidfd=pidfd, rank=0, cycle=0, warmup_iterations=3)


@pytest.fixture
def watched() -> Iterator[WatchedRank]:
    made = watch(TIMEOUTS, 0.2)
    yield made
    made.close()


def test_a_section_that_was_opened_in_a_pause_is_no_damage(clock: Clock, watched: WatchedRank) -> None:
    """Nobody looked meanwhile, so it may be open since any moment of the pause."""
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    watched.read()
    paused_ns = time.monotonic_ns()
    recorder.start("checkpointing")
    clock.pass_s(1.2)
    watched.excuse_since(paused_ns)
    reading = watched.read()
    assert reading.damage is None
    assert [section.name for section in reading.snapshot.open_sections] == ["checkpointing"]


def test_board_that_is_damaged_again_and_again_hides_no_hang(clock: Clock) -> None:
    watched = watch({"step": 0.3}, 0.2)
    began, step = time.monotonic(), CheckAction.WATCH
    while step is not CheckAction.END_RANK and time.monotonic() - began < 10:
        watched.board.words[layout.W_LAST_TRANSITION] = 7
        reading = watched.read()
        assert reading.damage is not None
        step = reading.outcome.action
        clock.pass_s(0.01)
    assert step is CheckAction.END_RANK
    assert time.monotonic() - began >= 0.3, "it may be in its section"
    watched.close()


def test_a_second_damage_finds_no_rank_that_has_sent_no_heartbeat_for_long(clock: Clock) -> None:
    """A rank that uses heartbeats alone opens no section, ever: its board isn't one that it has written nothing on."""
    config = FaultToleranceConfig(initial_rank_heartbeat_timeout=0.2, rank_heartbeat_timeout=30.0)
    pidfd = os.pidfd_open(os.getpid())
    watched = WatchedRank.attach(config, pid=os.getpid(), pidfd=pidfd, rank=0, cycle=0, warmup_iterations=0)
    recorder = Recorder(watched.board, SectionTimeouts(section={}, out_of_section=None))
    for _ in range(2):
        watched.board.words[layout.W_LAST_TRANSITION] = 7
        damaged = watched.read()
        assert damaged.damage is not None
        assert damaged.outcome.action is CheckAction.WATCH
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            recorder.heartbeat()
            assert watched.read().damage is None
            clock.pass_s(0.01)
    watched.close()


def test_an_end_of_the_monitoring_outlives_a_renewal(watched: WatchedRank) -> None:
    """Nobody would write it again: the rank would be judged by a board that says nothing."""
    watched.read()
    watched.board.words[layout.W_LAST_TRANSITION] = 7
    watched.board.words[layout.W_CLOSING] = layout.CLOSING
    reading = watched.read()
    assert reading.damage is not None
    assert reading.snapshot.closing
    assert reading.outcome.action is CheckAction.REST
    # what a stray write has left there isn't one
    for garbage in (1, layout.CLOSING + 1):
        watched.board.words[layout.W_CLOSING] = garbage
        assert not watched.read().snapshot.closing


def test_rank_on_a_renewed_board_is_not_judged_by_heartbeats(watched: WatchedRank) -> None:
    """The default timeout of the first heartbeat isn't for ranks that use sections."""
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    recorder.start("checkpointing")
    watched.read()
    watched.board.words[layout.W_LAST_TRANSITION] = 7
    reading = watched.read()
    assert reading.damage is not None
    assert HangKind.INITIAL_HEARTBEAT not in {interval.kind for interval in running_intervals(reading.snapshot)}


def test_a_rank_without_hooks_is_never_judged_by_timeouts_of_hooks() -> None:
    """The default ones too, of heartbeats: it never sends one. So it is after its board had to be renewed."""
    config = FaultToleranceConfig(rank_section_timeouts=TIMEOUTS, rank_out_of_section_timeout=0.2)
    pid, pidfd = os.getpid(), os.pidfd_open(os.getpid())
    watched = WatchedRank.attach(config, pid=pid, pidfd=pidfd, rank=0, cycle=0, warmup_iterations=0, watch_only=True)
    assert list(running_intervals(watched.read().snapshot)) == []
    watched.board.words[layout.W_LAST_TRANSITION] = 7
    reading = watched.read()
    assert reading.damage is not None
    assert reading.snapshot.watch_only
    assert list(running_intervals(reading.snapshot)) == []
    watched.close()


ARM = Arm(0, {"late": Armed(5.0, 6.0, 20.0), "step": Armed(7.0, 8.0, 30.0)}, {"heartbeat": 2.0})


def test_a_section_that_is_added_later_is_armed_at_the_next_look(watched: WatchedRank) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    watched.arm(ARM)
    watched.read()
    recorder.add_section("late")
    shown = watched.read().snapshot.sections
    assert [each.timeout_ns for each in shown] == [7 * S, 30 * S, 5 * S]
    assert watched.board.snapshot().sections == shown, "the launcher reads the words"


def test_arming_is_news_of_timeouts_once(watched: WatchedRank) -> None:
    assert watched.take_news(watched.read().snapshot).timeouts
    assert not watched.take_news(watched.read().snapshot).timeouts
    watched.arm(ARM)
    assert watched.take_news(watched.read().snapshot).timeouts
    assert not watched.take_news(watched.read().snapshot).timeouts


def test_a_raised_timeout_follows_what_the_client_calculates_anew(watched: WatchedRank) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    watched.arm(ARM)
    recorder.heartbeat()
    for own_s in (10.0, 12.0):
        recorder.write_heartbeat_timeouts(HeartbeatTimeouts(own_s, own_s, were_calculated=True))
        assert watched.read().snapshot.heartbeat_timeout_ns == 2 * own_s * S


def test_a_renewed_board_is_armed_and_keeps_own_timeouts_and_facts(clock: Clock, watched: WatchedRank) -> None:
    watched.arm(ARM)
    words = watched.board.words
    facts = {
        layout.W_LEARNING_FACTS: layout.FACT_HOOKS | layout.FACT_LEARNS,
        layout.W_STEPS: 40,
        layout.W_SAVES: 2,
        layout.W_ITERATIONS_BACK: 1,
        layout.W_GROUP_TIMEOUT: 600 * S,
    }
    for word, value in facts.items():
        words[word] = value
    assert watched.read().damage is None
    words[layout.W_LAST_TRANSITION] = 7
    reading = watched.read()
    assert reading.damage is not None
    assert {word: words[word] for word in facts} == facts
    (step, _) = reading.snapshot.sections
    assert (step.timeout_ns, step.own_timeout_ns) == (7 * S, round(0.3 * S))
    assert watched.board.snapshot().sections[0].armed == step.armed


def test_armed_words_that_were_written_over_are_repaired_and_hide_no_hang(clock: Clock, watched: WatchedRank) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    recorder.start("step")
    step = layout.slot(0)
    for word, value in ((layout.S_ARMED, 2**60), (layout.S_ARMED_FLAGS, 0)):
        watched.board.words[step + word] = value
    clock.pass_s(0.5)
    reading = watched.read()
    assert (reading.damage, reading.outcome.action) == (None, CheckAction.CONFIRM)
    assert watched.board.words[step + layout.S_ARMED] == 0


def test_an_extension_because_of_progress_is_explained_and_one_without_an_answer_is_not(
    clock: Clock, watched: WatchedRank
) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    watched.arm(Arm(0, {"step": Armed(0.3, 0.3, 100.0, enforced=True)}))
    for put_off in (True, False):
        recorder.start("step")
        outcome = watched.read().outcome
        while outcome.action is not CheckAction.END_RANK:
            clock.pass_s(0.011)
            outcome = watched.read().outcome
        verdict = outcome.verdict
        assert verdict is not None
        if put_off:
            watched.put_off(verdict)
        else:
            watched.extend_timeout(verdict, 5.0)
        assert watched.read().outcome.action is CheckAction.WATCH
        recorder.end("step")
        watched.read()
        found = watched.intervals(1, None).sketches["step"]
        assert (found.explained_s > 0) == (not put_off)


def test_a_survey_in_a_pause_counts_nothing_of_the_pause(clock: Clock, watched: WatchedRank) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    recorder.start("step")
    watched.read()
    clock.pass_s(1.0)
    paused_ns = time.monotonic_ns()
    clock.pass_s(100.0)
    assert 0.9 < watched.intervals(1, paused_ns).sketches["step"].open_s < 1.5
