"""Boards that are written over, to all that reads one: nothing of it may crash, end a healthy rank, or go unseen."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable

from megatron_ft.cli.status.status import job_object
from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.diagnosis.evidence import open_sections, with_board
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.launcher.rules.status_rows import RankReading
from megatron_ft.learning.timeouts import SectionTimeouts
from megatron_ft.link.base import layout as layout
from megatron_ft.link.base.codec import to_builtins
from megatron_ft.link.base.intervals import running_intervals
from megatron_ft.link.base.layout import BoardDamagedError
from megatron_ft.link.messages.rank_messages import RankHello
from megatron_ft.monitor import collect_evidence, watched_rank
from megatron_ft.monitor.watched_rank import WatchedRank
from megatron_ft.rank.client.recorder import Recorder
from tests.support.status_facts import job_facts, rank_facts

_SECTIONS = ("step", "outer", "save")
_TIMEOUT_S = 600.0
_LONGEST_REASON = 400
_JUDGED = layout.slot(len(_SECTIONS))
"""The words behind these are nobody's."""


def fuzz_boards(seed: int, count: int, say: Callable[[str], None]) -> None:
    """``count`` stray writes on the board of a healthy rank.

    Raises:
        AssertionError: one was taken for something it isn't.
    """
    healthy = _Healthy(random.Random(seed))
    try:
        strayed = Counter(healthy.suffer() for _ in range(count))
    finally:
        healthy.close()
    say(f"a healthy rank's board written over: {dict(strayed)}")
    assert strayed.keys() <= {"damaged", "not judged", "damaged, as the rank's next words show"}
    assert min(strayed["damaged"], strayed["not judged"]) > count // 10, strayed


def _show(reading: RankReading, now_ns: int) -> None:
    """Whatever it says, all that reads a board can write it as JSON."""
    facts = job_facts(rank_facts(local_rank=0, rank=0), readings={0: reading}, now_ns=now_ns)
    json.dumps(job_object(facts), allow_nan=False)
    if (snapshot := reading.snapshot) is not None:
        found = [open_sections(snapshot, now_ns), with_board(RankSnapshot(rank=0), snapshot, now_ns)]
        json.dumps(to_builtins(found), allow_nan=False)


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
        self._watched.board.words[layout.W_START] = max(1, time.monotonic_ns() - round(2e9 * _TIMEOUT_S))
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
        except BoardDamagedError as error:
            outcome = "damaged" if len(str(error)) < _LONGEST_REASON else f"damaged: {error}"
            last = self._watched.final_snapshot()
            assert last == before, told
            snapshot = before
            _show(RankReading(damaged=True), time.monotonic_ns())
        else:  # a word that is nobody's, or not one that is judged
            outcome = "not judged"
            assert check.verdict is self._watched.detector.suspect is None, (told, check, snapshot)
            assert list(running_intervals(snapshot)) == honest, (told, honest, snapshot)
            _show(RankReading(snapshot), time.monotonic_ns())
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
