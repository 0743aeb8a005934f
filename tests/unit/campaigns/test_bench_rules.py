"""Made-up jobs and the rules that are tried on them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench import rules
from tests.bench.traces import TRACES, Trace, make


def trace(took_s: list[float], *, repeats: tuple[int, ...] = (), moving: tuple[int, ...] = ()) -> Trace:
    begins, repeated = np.zeros(len(took_s), dtype=np.bool_), np.zeros(len(took_s), dtype=np.bool_)
    begins[0] = True
    repeated[list(repeats)] = True
    moves = np.zeros(len(took_s), dtype=np.bool_)
    moves[list(moving)] = True
    return Trace("test", np.array(took_s)[:, None], begins, repeated, moves)


def test_a_kill_is_a_step_above_the_timeout_that_was_learned_before() -> None:
    steps = [1.0] * 1000
    steps[100] = 50.0  # before the first save nothing is judged
    steps[400] = 7.0  # and now 0.5 * 50
    steps[600] = 251.0
    found = rules.play(trace(steps), rules.Reference())
    assert found.kills == 1


def test_a_step_that_repeats_is_tried_again_five_times_at_most() -> None:
    steps = [1.0] * 1000
    steps[600] = 1000.0
    assert rules.play(trace(steps), rules.Reference()).kills == 1
    assert rules.play(trace(steps, repeats=(600,)), rules.Reference()).kills == 5
    steps[600] = 100.0
    assert rules.play(trace(steps, repeats=(600,)), rules.OneRule()).kills == 2  # 60 s, 60 s, 120 s


def test_step_that_is_told_from_a_hang_is_ended_at_four_timeouts() -> None:
    steps = [1.0] * 1000
    steps[600] = 230.0
    assert rules.play(trace(steps), rules.OneRule()).kills == 1
    assert rules.play(trace(steps, moving=(600,)), rules.OneRule()).kills == 0
    steps[600] = 250.0
    assert rules.play(trace(steps, moving=(600,)), rules.OneRule()).kills == 1


def test_last_look_is_part_of_the_delay() -> None:
    assert rules.play(trace([1.0] * 600), rules.OneRule()).delay_s == 62.0


@pytest.mark.parametrize("name", sorted(TRACES.keys() - {"heavy tail", "stalls that no rank can tell"}))
def test_healthy_job_whose_slow_steps_can_be_told_from_a_hang_loses_no_rank(name: str) -> None:
    assert rules.play(make(name, 1, 100_000), rules.OneRule()).kills == 0
