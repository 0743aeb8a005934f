"""Boards full of garbage, to everything that reads one: nothing of it may crash, end a healthy rank, or go unseen."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron_ft.cli.status.status import job_object
from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.diagnosis.evidence import open_sections, with_board
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.launcher.rules.status_rows import RankReading
from megatron_ft.learning.timeouts import SectionTimeouts
from megatron_ft.link.base import layout as layout
from megatron_ft.link.base.codec import to_builtins
from megatron_ft.link.base.intervals import running_intervals
from megatron_ft.link.base.layout import BoardDamagedError, BoardSnapshot
from megatron_ft.link.messages.rank_messages import RankHello
from megatron_ft.monitor import collect_evidence, watched_rank
from megatron_ft.monitor.rules.hang_detector import HangDetector
from megatron_ft.monitor.watched_rank import WatchedRank
from megatron_ft.rank.client.recorder import Recorder
from tests.support.status_facts import job_facts, rank_facts

_SECTIONS = ("step", "outer", "save")
_TIMEOUT_S = 600.0
_JUDGED = layout.slot(len(_SECTIONS))
"""The words behind these are nobody's."""
_STAMPS = (
    *(layout.W_FIRST_ITERATION_AT, layout.W_FIRST_STEP_AT, layout.W_LAST_HEARTBEAT, layout.W_WARM_UP_OVER_AT),
    *(layout.W_COLLECTIVES_SEEN_AT, layout.W_COLLECTIVE_AT),
)
_COUNTS = (
    *(layout.W_STEPS, layout.W_SAVES, layout.W_ITERATIONS_BACK),
    *(layout.W_LOOKS, layout.W_LOOKS_WAITING, layout.W_WAITS),
    *(layout.W_ITERATIONS_SEEN, layout.W_HEARTBEATS, layout.W_TIMEOUTS_VERSION),
    *(layout.W_WARMUP_ITERATIONS, layout.W_RING_HEAD),
)
_LONGEST_REASON = 400


def fuzz_boards(seed: int, count: int, say: Callable[[str], None]) -> None:
    """``count`` random boards to the readers, and as many stray writes on the board of a healthy rank.

    Raises:
        AssertionError: one was taken for something it isn't.
    """
    rng = random.Random(seed)
    random_boards = Counter(_read_all(_random_board(rng), rng) for _ in range(count))
    say(f"random boards: {dict(random_boards)}")
    assert random_boards.keys() <= {"damaged", "ended", "suspected", "not late"}
    healthy = _Healthy(rng)
    try:
        strayed = Counter(healthy.suffer() for _ in range(count))
    finally:
        healthy.close()
    say(f"a healthy rank's board written over: {dict(strayed)}")
    assert min(strayed["damaged"], strayed["not judged"]) > count // 10, strayed


def _random_board(rng: random.Random) -> bytes:
    """All random, or with so much in order that the reader goes on."""
    raw = bytearray(rng.randbytes(8 * layout.RING))
    now = time.monotonic_ns()
    kind = rng.randrange(4)
    if kind:
        _put(raw, layout.W_MAGIC, layout.MAGIC)
        _put(raw, layout.W_START, _before(now, rng.randrange(1, 10**12)))
        _put(raw, layout.W_CLOSING, rng.choice((0, 0, 0, 1, layout.CLOSING)))
        for word in _STAMPS:
            _put(raw, word, rng.choice((0, now, _before(now, rng.randrange(10**12)))))
        for word in (layout.W_LAST_TRANSITION, layout.W_LAST_LOOK):
            _put(raw, word, rng.choice((0, now, _before(now, rng.randrange(10**9)))))
        _put(raw, layout.W_SECTION_COUNT, rng.choice((0, 1, 3, 64, 65, 2**63)))
        _put(raw, layout.W_LEARNING_FACTS, rng.choice((0, rng.randrange(64), rng.randrange(64), 64)))
        for word in _COUNTS:
            _put(raw, word, rng.choice((0, 1, rng.randrange(10**6), layout.MOST_COUNT)))
    for index in range(layout.MAX_SECTIONS if kind > 1 else 0):
        at = layout.slot(index)
        name = rng.choice(("step", "ü", "\x1b[2J", "a\nb", "x" * 63, f"s{index}", "")).encode()
        raw[8 * at : 8 * at + layout.NAME_BYTES] = name.ljust(layout.NAME_BYTES, b"\0")
        _put(raw, at + layout.S_OPENED_AT, rng.choice((0, now, _before(now, rng.randrange(10**9)))))
        _put(raw, at + layout.S_TIMEOUT, rng.choice((1, 10**9, layout.NO_TIMEOUT, rng.getrandbits(64))))
    return bytes(raw)


def _before(now: int, ns: int) -> int:
    """A board's clock starts with the machine: on one that was started a minute ago, nothing is an hour old."""
    return max(1, now - ns)


def _read_all(raw: bytes, rng: random.Random) -> str:
    now = time.monotonic_ns()
    try:
        snapshot = layout.decode(raw, now)
    except BoardDamagedError as error:
        reading = RankReading(damaged=True)
        outcome = "damaged" if len(str(error)) < _LONGEST_REASON else f"damaged: {error}"
    else:
        reading = RankReading(snapshot)
        outcome = _judge(snapshot, now, rng)
    facts = job_facts(rank_facts(local_rank=0, rank=0), readings={0: reading}, now_ns=now)
    json.dumps(job_object(facts), allow_nan=False)
    return outcome


def _judge(snapshot: BoardSnapshot, now: int, rng: random.Random) -> str:
    """Whatever it says, the judgement holds by its own words."""
    state = HangDetector(check_interval_ns=rng.choice((1, 10**9, 5 * 10**9)), last_look_ns=now - 1)
    for later in (0, 20_000_000):
        found = state.check(snapshot, now + later)
        assert found.next_look_ns is None or found.next_look_ns > now
    sections, note = open_sections(snapshot, now), with_board(RankSnapshot(rank=0), snapshot, now)
    json.dumps(to_builtins([sections, note]), allow_nan=False)
    if found.verdict is not None:
        assert found.verdict.elapsed_s >= found.verdict.timeout_s
        assert not snapshot.closing
        return "ended"
    return "not late" if state.suspect is None else "suspected"


class _Healthy:
    """A rank that is never late and is older than its timeouts, whose board is written over in each of its cycles."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._torn_s, watched_rank.TORN_S = watched_rank.TORN_S, 0.0
        self._begin()

    def _begin(self) -> None:
        timeouts = dict.fromkeys(_SECTIONS, _TIMEOUT_S)
        config = FaultToleranceConfig(
            initial_rank_heartbeat_timeout=_TIMEOUT_S,
            rank_heartbeat_timeout=_TIMEOUT_S,
            rank_section_timeouts=timeouts,
            rank_out_of_section_timeout=_TIMEOUT_S,
        )
        pidfd = os.pidfd_open(os.getpid())
        hello = RankHello(rank=0, cycle=0, warmup_iterations=0)
        self._watched = WatchedRank.attach(config, hello, pid=os.getpid(), pidfd=pidfd)
        os.close(pidfd)
        self._watched.board.words[layout.W_START] = _before(time.monotonic_ns(), round(2e9 * _TIMEOUT_S))
        self._watched.last_good = None
        self._recorder = Recorder(self._watched.board, SectionTimeouts(dict(timeouts), _TIMEOUT_S))
        self._recorder.start(self._rng.choice(("outer", "step")))
        self._iteration = 0
        self._go_on()
        self._watched.read()

    def suffer(self) -> str:
        """Write over the board once; return what the monitor makes of it."""
        before, check = self._watched.read()
        assert check.verdict is self._watched.detector.suspect is None
        honest = list(running_intervals(before))
        told = self._write_over()
        try:
            snapshot, check = self._watched.read()
        except BoardDamagedError:
            outcome, last = "damaged", self._watched.final_snapshot()
            assert last == before, told
            snapshot = before
        else:  # a word that is nobody's, or not one that is judged
            outcome = "not judged"
            assert check.verdict is self._watched.detector.suspect is None, (told, check, snapshot)
            assert list(running_intervals(snapshot)) == honest, (told, honest, snapshot)
        for record in (
            collect_evidence._last_events(self._watched.board, snapshot, time.monotonic_ns()),
            self._watched.take_minute(at_once=True),
        ):
            json.dumps(to_builtins(record), allow_nan=False)
        self._go_on()  # no hook fails
        if not self._watched.is_damaged:
            try:
                assert self._watched.read()[1].verdict is self._watched.detector.suspect is None, told
            except BoardDamagedError:
                outcome = "damaged, as the rank's next words show"
        if self._watched.is_damaged:
            self._watched.close()
            self._begin()
        return outcome

    def close(self) -> None:
        watched_rank.TORN_S = self._torn_s
        self._watched.close()

    def _go_on(self) -> None:
        recorder, rng = self._recorder, self._rng
        self._iteration += 1
        recorder.iteration(self._iteration)
        if "step" in recorder.open_sections:
            recorder.end("step")
        if rng.random() < 0.5:
            recorder.start("step")
        if rng.random() < 0.2:
            recorder.heartbeat()

    def _write_over(self) -> str:
        """What a stray pointer writes: random words, text, a run of one byte. Returns where, for an error."""
        rng, words = self._rng, self._watched.board.words
        first = rng.randrange(rng.choice((layout.SECTION_TABLE, _JUDGED, layout.BOARD_WORDS)))
        count = min(rng.choice((1, 2, 2, 5, 30, 1000, layout.BOARD_WORDS)), layout.BOARD_WORDS - first)
        kind = rng.choice(("random", "text", "ones") if count == 1 else ("random", "text", "ones", "zeros"))
        if kind == "random":
            data = rng.randbytes(8 * count)
        elif kind == "text":
            data = (b"Traceback (most recent call last):\n" * (8 * count // 30 + 1))[: 8 * count]
        else:
            data = (b"\xff" if kind == "ones" else b"\0") * (8 * count)
        words[first : first + count] = memoryview(data).cast("Q")
        return f"{kind}: {count} words from {first} on"


def _put(raw: bytearray, word: int, value: Any) -> None:
    struct.pack_into("=Q", raw, 8 * word, value)
