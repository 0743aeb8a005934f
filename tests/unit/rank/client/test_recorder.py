"""The recorder on a board: what it remembers of intervals for the client's own calculation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ft.learning.timeouts import SectionTimeouts
from megatron_ft.link.board import Board
from megatron_ft.rank.client import recorder as recorder_module
from megatron_ft.rank.client.recorder import Recorder
from tests.support.boards import new_board

S = 1_000_000_000
START = 1000 * S


class Bench:
    def __init__(self, board: Board) -> None:
        self.now_ns = START
        self.recorder = Recorder(board, SectionTimeouts({"step": None, "save": None}, None))

    def interval(self, section: str, seconds: float, *, pause_s: float = 0.0) -> None:
        self.now_ns += round(pause_s * S)
        self.recorder.start(section)
        self.now_ns += round(seconds * S)
        self.recorder.end(section)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    board = new_board(start_ns=START, sections={"step": None, "save": None})
    made = Bench(board)
    monkeypatch.setattr(recorder_module, "monotonic_ns", lambda: made.now_ns)
    yield made
    board.close()


def test_time_since_the_last_section_counts_when_the_clocks_are_restarted(bench: Bench) -> None:
    bench.interval("step", 1.0)
    bench.now_ns += 7 * S
    bench.recorder.restart_clocks()
    bench.now_ns += 2 * S
    assert bench.recorder.open_ages() == {"out_of_section": 2 * S}
    assert bench.recorder.observed()["out_of_section"] == 7 * S
