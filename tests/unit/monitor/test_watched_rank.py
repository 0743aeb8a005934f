"""A monitor's eye on one board: what it takes for damage, and that a rank is not judged by a damaged board."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.learning.messages import Arm, Intervals
from megatron_ft.learning.timeouts import HeartbeatTimeouts, SectionTimeouts
from megatron_ft.link.base import layout as layout
from megatron_ft.link.base.intervals import running_intervals
from megatron_ft.link.base.layout import BoardDamagedError
from megatron_ft.link.facts.monitor import Timeouts
from megatron_ft.link.messages.rank_messages import RankHello
from megatron_ft.monitor.watched_rank import WatchedRank
from megatron_ft.rank.client.recorder import Recorder
from tests.support.clock import Clock, clock

__all__ = ["clock"]

S = 1_000_000_000
TIMEOUTS = {"step": 0.3, "checkpointing": 30.0}


def watch(timeouts: dict[str, float], out_of_section: float | None, *, watch_only: bool = False) -> WatchedRank:
    config = FaultToleranceConfig(rank_section_timeouts=timeouts, rank_out_of_section_timeout=out_of_section)
    pidfd = os.pidfd_open(os.getpid())
    hello = RankHello(rank=0, cycle=0, warmup_iterations=3, watch_only=watch_only)
    try:
        return WatchedRank.attach(config, hello, pid=os.getpid(), pidfd=pidfd)
    finally:
        os.close(pidfd)


@pytest.fixture
def watched() -> Iterator[WatchedRank]:
    made = watch(TIMEOUTS, 0.2)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (layout.W_MAGIC, 0),
        (layout.W_LAST_TRANSITION, 7),
        (layout.W_LAST_TRANSITION, 0),
        (layout.W_SECTION_COUNT, 0),
        (layout.slot(0) + layout.S_OPENED_AT, 0),
        (layout.slot(0) + layout.S_TIMEOUT, 1),
    ],
)
def test_damaged_board_is_marked_for_all_its_readers_and_stays_damaged(
    clock: Clock, watched: WatchedRank, word: int, value: int
) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    recorder.start("step")
    good = watched.read()[0]
    watched.board.words[word] = value
    clock.pass_s(100.0)
    with pytest.raises(BoardDamagedError):
        watched.read()
    recorder.end("step")
    recorder.heartbeat()
    assert watched.is_damaged
    assert watched.final_snapshot() == good
    with pytest.raises(BoardDamagedError):
        watched.board.snapshot()  # as the launcher reads it
    assert WatchedRank.take_over(watched.attached, FaultToleranceConfig()).is_damaged
    assert watched.board.words[layout.W_NEXT_LOOK] == layout.NO_TIMEOUT


def test_board_that_is_torn_for_a_moment_is_not_damaged(clock: Clock, watched: WatchedRank) -> None:
    torn = watched.board.raw().replace(layout.MAGIC.to_bytes(8, "little"), bytes(8))
    raws = [torn, watched.board.raw()]
    watched.board.raw = lambda: raws.pop(0)  # type: ignore[method-assign]
    assert watched.read()[1].verdict is watched.detector.suspect is None
    assert not watched.is_damaged


def test_end_of_the_monitoring_is_taken_once_also_from_a_damaged_board(watched: WatchedRank) -> None:
    watched.board.words[layout.W_CLOSING] = 1  # a stray value
    with pytest.raises(BoardDamagedError):
        watched.read()
    assert not watched.take_end()
    watched.board.words[layout.W_CLOSING] = layout.CLOSING
    assert [watched.take_end(), watched.take_end()] == [True, False]


def test_a_rank_without_hooks_is_never_judged_by_timeouts_of_hooks() -> None:
    """The default ones too, of heartbeats: it never sends one."""
    watched = watch(TIMEOUTS, 0.2, watch_only=True)
    assert list(running_intervals(watched.read()[0])) == []
    watched.close()


ARM = Arm(0, {"late": 5.0, "step": 7.0, "heartbeat": 6.0})


def test_a_section_that_is_added_later_is_armed_at_the_next_look(watched: WatchedRank) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    watched.armed = ARM
    watched.read()
    recorder.add_section("late")
    shown = watched.read()[0].sections
    assert [each.timeout_ns for each in shown] == [7 * S, 30 * S, 5 * S]
    assert watched.board.snapshot().sections == shown, "the launcher reads the words"


def test_arming_is_news_of_timeouts_once(watched: WatchedRank) -> None:
    assert [type(each) for each in watched.take_news(watched.read()[0])] == [Timeouts]
    assert not list(watched.take_news(watched.read()[0]))
    watched.armed = ARM
    assert [type(each) for each in watched.take_news(watched.read()[0])] == [Timeouts]
    assert not list(watched.take_news(watched.read()[0]))


def test_doubled_timeout_gives_way_to_a_longer_one_that_the_client_calculates(watched: WatchedRank) -> None:
    sections = SectionTimeouts(section=TIMEOUTS, out_of_section=0.2)
    recorder = Recorder(watched.board, sections)
    watched.armed = ARM
    recorder.heartbeat()
    for own_s in (4.0, 12.0):
        recorder.write_timeouts(sections, HeartbeatTimeouts(own_s, own_s, were_calculated=True))
        assert watched.read()[0].heartbeat_timeout_ns == max(6.0, own_s) * S


def test_armed_words_that_were_written_over_are_repaired_and_hide_no_hang(clock: Clock, watched: WatchedRank) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    recorder.start("step")
    step = layout.slot(0)
    for word, value in ((layout.S_ARMED, 2**60), (layout.S_ARMED + 1, 0)):
        watched.board.words[step + word] = value
    clock.pass_s(0.5)
    watched.read()
    assert watched.detector.suspect is not None
    assert watched.board.words[step + layout.S_ARMED] == 0


def test_extended_interval_is_counted_when_it_ends(clock: Clock, watched: WatchedRank) -> None:
    recorder = Recorder(watched.board, SectionTimeouts(section=TIMEOUTS, out_of_section=0.2))
    watched.armed = Arm(0, {"step": 0.3})
    for count in (1, 2):
        recorder.start("step")
        while (verdict := watched.read()[1].verdict) is None:
            clock.pass_s(0.011)
        watched.detector.extend_timeout(verdict, 5 * S)
        assert watched.read()[1].verdict is watched.detector.suspect is None
        recorder.end("step")
        recorder.saved()
        (news,) = (each for each in watched.take_news(watched.read()[0]) if isinstance(each, Intervals))
        assert news.seen["step"].count == count
