"""What a launcher answers to a question for its status, and one that doesn't answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_ft.cli.status import jobs
from megatron_ft.cli.status.jobs import RunningJob, facts_of
from megatron_ft.diagnosis.waits import Lags, RankLag
from megatron_ft.errors import FaultToleranceError
from megatron_ft.launcher.cycle.job_status import JobStatus
from megatron_ft.launcher.rules.status_rows import RankReading
from megatron_ft.link.base.layout import W_SECTION_COUNT, BoardDamagedError
from megatron_ft.link.base.pauses import Pauses
from megatron_ft.link.board import Board
from megatron_ft.link.messages.job_facts import JobFacts, RankState
from megatron_ft.link.wire import listen
from megatron_ft.records.rules.metrics import RANK_LAG, JobMetrics, NodeActivity
from tests.support.boards import new_board


class FakeLauncher:
    """The status of a launcher, with boards that nobody writes."""

    def __init__(self) -> None:
        self.boards: dict[int, Board] = {}
        self.paused = Pauses()
        line = SimpleNamespace(
            run_id="demo",
            namespace=SimpleNamespace(max_restarts=3),
            options=SimpleNamespace(observe_only=False),
        )
        self.status = JobStatus(cast("Any", line), log_dir="/logs", monitors=cast("Any", self))
        self.lags = Lags(0, 0.0)

    def __getitem__(self, local_rank: int) -> Any:
        """As ``Monitors`` has it."""
        return SimpleNamespace(reading=lambda cycle: self._reading(local_rank, cycle))

    def _reading(self, local_rank: int, cycle: int) -> RankReading:
        if cycle != 0 or local_rank not in self.boards:
            return RankReading()
        try:
            return RankReading(self.boards[local_rank].snapshot())
        except BoardDamagedError:
            return RankReading(damaged=True)

    def cycle_started(self, ranks: int, cycle: int = 0) -> Any:
        """That many ranks, all of them this process; who has a board says ``boards``."""
        record = SimpleNamespace(
            cycle=cycle,
            met_ns=time.monotonic_ns(),
            spawned_ns=time.monotonic_ns(),
            ranks=[10 + local_rank for local_rank in range(ranks)],
            started={local_rank: SimpleNamespace(pid=os.getpid()) for local_rank in range(ranks)},
            exits={},
            hung={},
            nodes=2,
            world_size=ranks + 10,
        )
        self.agent = SimpleNamespace(
            started=record,
            ended=None,
            failed=None,
            restarts_left=2,
            part=lambda _kind: SimpleNamespace(lags=self.lags),
        )
        self.status.follow(cast("Any", self.agent))
        return record

    def add_boards(self, count: int) -> None:
        """Boards of the first ``count`` local ranks."""
        for local_rank in range(count):
            self.boards[local_rank] = new_board(rank=10 + local_rank, sections={"step": 10.0}, out_of_section=30.0)


@pytest.fixture
def fake() -> Iterator[FakeLauncher]:
    fake = FakeLauncher()
    yield fake
    for board in fake.boards.values():
        board.close()


def states(facts: JobFacts) -> list[RankState]:
    return [row.state for row in facts.ranks]


def test_rank_that_holds_the_others_back_is_in_the_facts_and_its_lag_in_the_metrics(fake: FakeLauncher) -> None:
    lags = RankLag(1, "b", 0.3, 0.1), RankLag(0, "a", 0.02, 0.4)
    fake.lags = Lags(0, 12.0, lags, slow=(1,))
    fake.cycle_started(2)
    assert fake.status.facts().slow_ranks == lags[:1]
    fake.agent.activity = NodeActivity.TRAINING
    shown = {each.metric: each.values for each in JobMetrics().series(fake.status.readings(), of_job=True)}
    assert shown[RANK_LAG] == {("1", "b"): 0.3, ("0", "a"): 0.02}


def test_damaged_board_is_shown_until_it_is_well_again(fake: FakeLauncher) -> None:
    fake.add_boards(2)
    fake.cycle_started(2)
    board = fake.boards[0]
    count, board.words[W_SECTION_COUNT] = board.words[W_SECTION_COUNT], 1000
    assert states(fake.status.facts()) == [RankState.DAMAGED, RankState.RUNNING]
    board.words[W_SECTION_COUNT] = count
    assert states(fake.status.facts()) == [RankState.RUNNING, RankState.RUNNING]


def test_launcher_that_does_not_answer_is_given_up_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ANSWER_S", 0.2)
    job = RunningJob(launcher_pid=os.getpid(), run_id="demo", socket=str(tmp_path / "launcher.sock"))
    with pytest.raises(FaultToleranceError, match=f"ft_launcher {os.getpid()} can't be reached"):
        facts_of(job)
    with listen(str(tmp_path / "launcher.sock")):
        began = time.monotonic()
        with pytest.raises(FaultToleranceError, match=f"^ft_launcher {os.getpid()}, job demo, doesn't answer$"):
            facts_of(job)
        assert 0.2 <= time.monotonic() - began < 5.0
