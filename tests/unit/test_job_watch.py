"""Asking a launcher for its status: the question, the boards in several messages, and peers that don't answer."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_ft.core.board.layout import W_SECTION_COUNT
from megatron_ft.core.board.pauses import Pauses
from megatron_ft.core.diagnosis.exits import Cause, CauseKind
from megatron_ft.core.errors import FaultToleranceError, ProtocolError
from megatron_ft.core.grace import Grace
from megatron_ft.core.job.restart_policy import Action, Decision
from megatron_ft.core.status.job_facts import JobFacts, Phase
from megatron_ft.core.status.rows import RankState, make_rows
from megatron_ft.ipc import job_watch
from megatron_ft.ipc.board import Board, BoardTimeouts, create_memory
from megatron_ft.ipc.job_watch import JobWatch
from megatron_ft.ipc.jobs import RunningJob
from megatron_ft.ipc.wire import MAX_FDS, ChannelClosedError, close_fds, connect, listen
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.control import ControlSocket
from megatron_ft.launcher.job_status import JobStatus

MORE_THAN_A_MESSAGE = 256
"""The kernel takes at most 253 descriptors with one message."""


class FakeLauncher:
    """The control socket and the status of a launcher, with boards that nobody writes."""

    def __init__(self, directory: Path) -> None:
        self.fds: dict[int, int] = {}
        self.paused = Pauses()
        self.said: list[str] = []
        self.reactor = Reactor()
        line = SimpleNamespace(
            run_id="demo",
            namespace=SimpleNamespace(max_restarts=3),
            options=SimpleNamespace(observe_only=False),
        )
        self.status = JobStatus(cast("Any", line), log_dir="/logs", monitors=cast("Any", self))
        self.control = ControlSocket(str(directory / "launcher.sock"), self.reactor, say=self.said.append)
        self.control.on_question = self.status.answer
        self.control.start()
        self.job = RunningJob(launcher_pid=os.getpid(), run_id="demo", run_dir=str(directory))
        self.longest_turn_s = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def board_fd(self, local_rank: int, cycle: int) -> int | None:
        """As ``Monitors.board_fd``."""
        return self.fds.get(local_rank) if cycle == 0 else None

    def cycle_started(self, ranks: int, cycle: int = 0) -> Any:
        """That many ranks, all of them this process; who has a board says ``fds``."""
        record = SimpleNamespace(
            cycle=cycle,
            met_ns=time.monotonic_ns(),
            spawned_ns=time.monotonic_ns(),
            global_ranks=[10 + local_rank for local_rank in range(ranks)],
            workers={local_rank: SimpleNamespace(pid=os.getpid()) for local_rank in range(ranks)},
            exits={},
            hung={},
        )
        self.status.cycle_started(cast("Any", record), nodes=2, world_size=ranks + 10, restarts_left=2)
        return record

    def add_boards(self, count: int) -> None:
        """Boards of the first ``count`` local ranks."""
        for local_rank in range(count):
            self.fds[local_rank] = create_memory()
            board = Board(self.fds[local_rank])
            timeouts = BoardTimeouts(None, None, 0, {"step": 10.0}, 30.0)
            values: dict[str, Any] = {"cycle": 0, "rank": 10 + local_rank, "pid": os.getpid(), "warmup_iterations": 0}
            board.initialise(start_ns=time.monotonic_ns(), timeouts=timeouts, **values)
            board.close()

    def close(self) -> None:
        """Stop to answer."""
        self._stop = True
        self._thread.join()
        self.control.close()
        self.reactor.close()
        close_fds(list(self.fds.values()))

    def _run(self) -> None:
        while not self._stop:
            began = time.monotonic()
            self.reactor.run_once(0.02)
            self.longest_turn_s = max(self.longest_turn_s, time.monotonic() - began)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeLauncher]:
    fake = FakeLauncher(tmp_path)
    yield fake
    fake.close()


@pytest.fixture
def watch(fake: FakeLauncher) -> Iterator[JobWatch]:
    watch = JobWatch(fake.job)
    yield watch
    watch.close()


def states(watch: JobWatch) -> list[RankState]:
    assert watch.facts is not None
    readings = watch.readings()
    return [row.state for row in make_rows(watch.facts, readings, time.monotonic_ns())]


def again(watch: JobWatch) -> None:
    """As if it were time for another question."""
    watch._next_s = 0.0
    watch.wait()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_before_the_first_cycle(watch: JobWatch) -> None:
    watch.wait()
    assert watch.facts is not None
    assert (watch.facts.cycle, watch.facts.ranks, watch.facts.phase) == (None, (), Phase.STARTING)
    assert (watch.facts.run_id, watch.facts.log_dir, watch.facts.restarts_left) == ("demo", "/logs", 3)
    assert watch.readings() == {}


def test_more_boards_than_the_kernel_takes_with_one_message(fake: FakeLauncher, watch: JobWatch) -> None:
    before = open_fds()
    fake.add_boards(MORE_THAN_A_MESSAGE)
    fake.cycle_started(MORE_THAN_A_MESSAGE + 1)
    watch.wait()
    readings = watch.readings()
    for local_rank in range(MORE_THAN_A_MESSAGE):
        snapshot = readings[local_rank].snapshot
        assert snapshot is not None
        assert snapshot.rank == 10 + local_rank
    assert states(watch) == [RankState.RUNNING] * MORE_THAN_A_MESSAGE + [RankState.NOT_ATTACHED]
    watch.close()
    # ours of the boards, and nothing that was opened for the answers
    assert open_fds() <= before + MORE_THAN_A_MESSAGE


def test_boards_are_asked_for_once_and_forgotten_with_their_cycle(fake: FakeLauncher, watch: JobWatch) -> None:
    fake.add_boards(2)
    record = fake.cycle_started(3)
    watch.wait()
    mapped = dict(watch._boards)
    assert len(mapped) == 2
    again(watch)
    assert watch._boards == mapped
    # a new board in the place of an old one, as after another hello
    close_fds([fake.fds[1]])
    fake.fds[1] = create_memory()
    again(watch)
    assert len(watch._boards) == 2
    assert states(watch) == [RankState.RUNNING, RankState.DAMAGED, RankState.NOT_ATTACHED]
    cause = Cause(kind=CauseKind.CRASH, text="x" * 1_000_000, rank=10)
    fake.status.cycle_ended(record, Decision(action=Action.RESTART, restarts_left=1, reason=""), cause)
    again(watch)
    assert watch.facts is not None
    assert (watch.facts.phase, watch.facts.restarts_left) == (Phase.RESTARTING, 1)
    assert watch.facts.last_cause is not None
    assert len(watch.facts.last_cause.text) == 2000
    fake.cycle_started(3, cycle=1)
    again(watch)
    assert states(watch) == [RankState.NOT_ATTACHED] * 3
    assert watch._boards == {}


def test_ends_and_verdicts_of_ranks(fake: FakeLauncher, watch: JobWatch) -> None:
    fake.add_boards(3)
    record = fake.cycle_started(3)
    record.exits[0] = SimpleNamespace(exitcode=-9)
    record.hung[2] = Grace(1.0, {})
    watch.wait()
    assert watch.facts is not None
    assert [rank.exit_code for rank in watch.facts.ranks] == [-9, None, None]
    assert states(watch) == [RankState.EXITED, RankState.RUNNING, RankState.HUNG]


def test_the_launcher_is_asked_sooner_when_a_process_has_gone(fake: FakeLauncher, watch: JobWatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    record = fake.cycle_started(1)
    watch.wait()
    watch._next_s = later = time.monotonic() + 60
    assert states(watch) == [RankState.NOT_ATTACHED]
    assert watch._next_s == later
    record.workers[0].pid = gone.pid
    again(watch)
    watch._next_s = later
    assert states(watch) == [RankState.EXITED]
    assert watch._next_s <= time.monotonic() + 0.2
    record.exits[0] = SimpleNamespace(exitcode=0)
    again(watch)
    watch._next_s = later
    assert states(watch) == [RankState.EXITED]
    assert watch._next_s == later


def test_a_damaged_board_and_one_that_is_well_again(fake: FakeLauncher, watch: JobWatch) -> None:
    fake.add_boards(2)
    fake.cycle_started(2)
    watch.wait()
    board = Board(fake.fds[0])
    count, board.words[W_SECTION_COUNT] = board.words[W_SECTION_COUNT], 1000
    assert states(watch) == [RankState.DAMAGED, RankState.RUNNING]
    board.words[W_SECTION_COUNT] = count
    assert states(watch) == [RankState.RUNNING, RankState.RUNNING]
    board.close()


def test_nobody_can_write_through_what_is_handed_out(fake: FakeLauncher) -> None:
    fake.add_boards(1)
    fake.cycle_started(1)
    channel = connect(fake.control.path, 5.0)
    channel.send({"type": "boards", "local_ranks": [0, 0, 5]})
    (fd,) = channel.wait_message(5.0).fds
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)
    channel.close()


@pytest.mark.parametrize("wrong", [None, 3, [[]], ["0"], [0] * (MAX_FDS + 1)])
def test_questions_that_make_no_sense_end_only_that_connection(fake: FakeLauncher, wrong: object) -> None:
    fake.cycle_started(1)
    channel = connect(fake.control.path, 5.0)
    channel.send({"type": "boards", "local_ranks": wrong})
    with pytest.raises(ChannelClosedError):
        channel.wait_message(5.0)
    assert "names at most 8 local ranks" in fake.said[0]
    sane = JobWatch(fake.job)
    sane.wait()
    sane.close()


def test_a_peer_that_does_not_read_is_dropped_and_holds_nobody_up(fake: FakeLauncher, watch: JobWatch) -> None:
    fake.add_boards(MAX_FDS)
    fake.cycle_started(64)
    deaf = connect(fake.control.path, 5.0)
    with pytest.raises(ChannelClosedError):
        for _ in range(100_000):
            deaf.send({"type": "status"}, timeout_s=5.0)
            deaf.send({"type": "boards", "local_ranks": list(range(MAX_FDS))}, timeout_s=5.0)
    watch.wait()
    assert states(watch)[: MAX_FDS + 1] == [RankState.RUNNING] * MAX_FDS + [RankState.NOT_ATTACHED]
    assert fake.longest_turn_s < 1.0


def test_a_launcher_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_watch, "ANSWER_S", 0.2)
    job = RunningJob(launcher_pid=os.getpid(), run_id="demo", run_dir=str(tmp_path))
    with pytest.raises(FaultToleranceError, match=f"ft_launcher {os.getpid()} can't be reached"):
        JobWatch(job)
    with listen(str(tmp_path / "launcher.sock")):
        watch = JobWatch(job)
        began = time.monotonic()
        with pytest.raises(FaultToleranceError, match=f"^ft_launcher {os.getpid()}, job demo, doesn't answer$"):
            watch.wait()
        assert 0.2 <= time.monotonic() - began < 5.0
        assert watch.silent_s() >= 0.2
        watch.close()


def test_a_launcher_that_ends_while_it_is_watched(tmp_path: Path) -> None:
    fake = FakeLauncher(tmp_path)
    fake.add_boards(1)
    fake.cycle_started(1)
    watch = JobWatch(fake.job)
    watch.wait()
    fake.close()
    with pytest.raises(FaultToleranceError, match="can't be asked: the peer is gone"):
        watch.step()
    assert states(watch) == [RankState.RUNNING]  # of its memory, to the last
    watch.close()


def test_what_a_newer_launcher_says_beside_is_passed_over(fake: FakeLauncher) -> None:
    fake.add_boards(1)
    fake.cycle_started(2)
    message = fake.status._facts().to_message()
    facts = JobFacts.from_message(message)
    message["ranks"][0]["colour"] = message["colour"] = "blue"
    assert JobFacts.from_message(json.loads(json.dumps(message))) == facts
    del message["ranks"][0]["pid"]
    with pytest.raises(ProtocolError, match="another version"):
        JobFacts.from_message(message)
