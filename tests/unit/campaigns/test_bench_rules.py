"""Made-up jobs and the rules that are tried on them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench import recorded, rules
from tests.bench.traces import TRACES, Trace, make


def trace(took_s: list[float], *, repeats: tuple[int, ...] = (), moving: tuple[int, ...] = ()) -> Trace:
    begins, repeated = np.zeros(len(took_s), dtype=np.bool_), np.zeros(len(took_s), dtype=np.bool_)
    begins[0] = True
    repeated[list(repeats)] = True
    moves = np.zeros(len(took_s), dtype=np.bool_)
    moves[list(moving)] = True
    return Trace("test", np.array(took_s)[:, None], begins, repeated, moves)


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_for_the_same_seed(name: str) -> None:
    one, same, other = (make(name, seed, 40_000) for seed in (1, 1, 2))
    assert np.array_equal(one.took_s, same.took_s)
    assert not np.array_equal(one.took_s, other.took_s)
    assert one.took_s.size == 40_000
    assert one.took_s.min() > 0


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
    steps[600] = 15.0
    assert rules.play(trace(steps, repeats=(600,)), rules.Budget()).kills == 2  # 5 s, 10 s, 20 s


def test_a_step_ten_times_as_long_now_and_then_ends_ours_once_at_most() -> None:
    steps = [1.0] * 20_000
    slow = tuple(range(900, 20_000, 900))
    for at in slow:
        steps[at] = 10.0
    assert rules.play(trace(steps, repeats=slow), rules.Budget()).kills <= 1


def test_step_that_is_told_from_a_hang_is_ended_at_the_limit() -> None:
    steps = [1.0] * 1000
    steps[600] = 15.0
    assert rules.play(trace(steps), rules.Budget(), looks=True).kills == 1
    assert rules.play(trace(steps, moving=(600,)), rules.Budget(), looks=True).kills == 0
    steps[600] = 50.0  # four times what the reference gives, which has seen a first step of 2 s
    assert rules.play(trace(steps, moving=(600,)), rules.Budget(), looks=True).kills == 1


def test_check_for_progress_is_part_of_the_delay() -> None:
    without, with_looks = (rules.play(trace([1.0] * 600), rules.Budget(), looks=looks) for looks in (False, True))
    assert with_looks.delay_s == pytest.approx(without.delay_s + 1.9)


def test_told_step_does_not_raise_the_timeout() -> None:
    steps, told = [1.0] * 1000, (600, 610, 620)
    for at in told:
        steps[at] = 15.0
    rule = rules.Budget()
    rules.play(trace(steps, moving=told), rule, looks=True)
    assert rule.timeout_s == 5.0


def test_recorded_job_is_read_as_it_was_written() -> None:
    kept = recorded.read("a-job", {"about": "", "begins": [0, 2], "took_ms": [[1000, 2000, 0], [1500, 1000, 900]]})
    assert kept.name == "a job"
    assert kept.took_s.tolist() == [[1.0, 1.5], [2.0, 1.0], [0.001, 0.9]]
    assert np.flatnonzero(kept.begins).tolist() == [0, 2]


@pytest.mark.parametrize("name", ["steady", "drifting"])
def test_budget_rule_in_an_undisturbed_job_ends_nobody_and_notices_sooner(name: str) -> None:
    made = make(name, 1, 50_000)
    ours, reference = rules.play(made, rules.Budget()), rules.play(made, rules.Reference())
    assert ours.kills == 0
    assert ours.delay_s < reference.delay_s
