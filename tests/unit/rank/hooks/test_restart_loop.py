"""A job that a timeout could end for ever: a step takes ten times as long every 30 minutes, and after each restart.

The hooks, the board, the monitor's judgement, the state file and what the launcher tells the next cycle are the real
ones; the clock is the test's. Nobody is seen to make progress, so that a learned timeout ends the rank each time.
"""

from __future__ import annotations

import random
import time

import pytest

from megatron_ft import fault_tolerance as ft
from megatron_ft.core.board import layout as layout
from megatron_ft.core.board.hang_detector import CONFIRM_AFTER_NS, Action, MonitorState, check_board
from megatron_ft.core.timeouts.raised import RAISED_TIMEOUTS, RaisedTimeouts
from megatron_ft.rank.client import recorder
from tests.support.training import Bench, bench, save_checkpoint

__all__ = ["bench"]  # a fixture

S = 1_000_000_000
STEPS = 12_000
SAVE_EVERY = 250
EVERY_NS = 1800 * S
MOST_CYCLES = 12


class Job:
    """Runs cycle after cycle until all steps are done, or it is given up."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.now_ns = time.monotonic_ns()
        self.raised = RaisedTimeouts()
        self.suspects_early = False
        self.kills: list[tuple[str, float]] = []
        self.done = self.saved = 0
        self._slow_ns = self.now_ns
        self._chance = random.Random(4)
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(recorder, "_monotonic_ns", lambda: self.now_ns)

    def run(self) -> None:
        for cycle in range(MOST_CYCLES):
            if self.done == STEPS:
                return
            self._monkeypatch.setenv(RAISED_TIMEOUTS, self.raised.environment(cycle).get(RAISED_TIMEOUTS, ""))
            self.now_ns = max(self.now_ns, time.monotonic_ns()) + 30 * S  # a restart
            state = self.bench.start()
            self.now_ns = max(self.now_ns, time.monotonic_ns())
            self.done = self.saved
            if cycle:
                ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
            self._train(state, cycle)

    def _train(self, state: ft.GlobalState, cycle: int) -> None:
        assert state.train_state is not None
        for of_cycle in range(STEPS - self.done):
            state.train_state.step = self.done
            is_slow = self.now_ns - self._slow_ns >= EVERY_NS
            took_s = 10.0 if is_slow or (cycle and of_cycle < 2) else self._chance.uniform(0.95, 1.05)
            if is_slow:
                self._slow_ns = self.now_ns
            ft.on_training_step_start(state)
            if not self._lasts(state, took_s, cycle):
                return
            ft.on_training_step_end(state)
            self.done += 1
            if self.done % SAVE_EVERY == 0:
                save_checkpoint(state)
                self.saved = self.done
        ft.shutdown(state)

    def _lasts(self, state: ft.GlobalState, took_s: float, cycle: int) -> bool:
        """Whether the rank lives when a step is over."""
        board, watching = state.rank_monitor_client._board, MonitorState(10**18, self.now_ns, self.suspects_early)
        self.now_ns += round(took_s * S)
        if took_s < 5.0:
            return True  # what is learned is never below a usual step: see the assertion below
        snapshot = layout.decode(board.raw(), self.now_ns)
        check_board(watching, snapshot, self.now_ns - CONFIRM_AFTER_NS)
        outcome = check_board(watching, snapshot, self.now_ns)
        if outcome.action is not Action.END_RANK:
            return True
        assert outcome.verdict is not None
        assert outcome.verdict.is_learned
        assert outcome.verdict.timeout_ns > 4 * S
        name = outcome.verdict.section or outcome.verdict.kind.value
        self.kills.append((name, outcome.verdict.timeout_ns / 1e9))
        self.raised.note_kill(name, cycle)
        ft.abort(state)
        return False


@pytest.fixture
def job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(bench, monkeypatch)


@pytest.mark.parametrize("suspects_early", [False, True])
def test_it_runs_to_its_end_with_at_most_one_kill(job: Job, suspects_early: bool) -> None:
    """Where a rank is suspected early and nothing tells the slow step from a hang, too."""
    job.suspects_early = suspects_early
    job.run()
    assert job.done == STEPS
    assert len(job.kills) <= 1, job.kills


def test_without_what_a_kill_teaches_it_is_ended_again_and_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(_raised: RaisedTimeouts, _cycle: int) -> dict[str, str]:
        return {}

    monkeypatch.setattr(RaisedTimeouts, "environment", forgotten)
    job.run()
    assert len(job.kills) > 1, job.kills
