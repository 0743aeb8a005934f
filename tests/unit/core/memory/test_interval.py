"""How often a memory checkpoint is worth its cost."""

from __future__ import annotations

import pytest

from megatron_ft.core.memory.interval import MOST_OF_TRAINING, Pace, choose


@pytest.mark.parametrize(
    ("cost_s", "step_s", "restarts", "ran_s", "every"),
    [
        (0.005, 1.0, 9, 61_200, 8),  # a failure each 6480 s: 8.05 s
        (0.005, 1.0, 0, 0, 8),  # nothing is known: sqrt(2 x 0.005 x 3600) = 6 s
        (0.0001, 1.0, 0, 0, 1),
        (0.5, 1.0, 0, 0, 64),  # Young: 60 s
        (1.0, 1.0, 99, 0, 128),  # a failure each 36 s: Young says 8.5 s, which would cost 12 %
        (0.5, 0.25, 0, 0, 256),
        (0.0, 0.0, 0, 0, 1),
    ],
)
def test_interval_weighs_cost_against_failures(
    cost_s: float, step_s: float, restarts: int, ran_s: float, every: int
) -> None:
    assert choose(cost_s, step_s, restarts=restarts, ran_s=ran_s).every == every


@pytest.mark.parametrize("cost_s", [1e-4, 0.003, 0.09, 2.0, 50.0])
@pytest.mark.parametrize("step_s", [0.01, 0.7, 30.0])
@pytest.mark.parametrize("restarts", [0, 1000])
def test_snapshots_never_take_more_than_their_part_and_intervals_are_powers_of_two(
    cost_s: float, step_s: float, restarts: int
) -> None:
    every = choose(cost_s, step_s, restarts=restarts, ran_s=0.0).every
    assert every & (every - 1) == 0
    assert cost_s <= MOST_OF_TRAINING * every * step_s


def test_reason_says_which_rule_has_decided() -> None:
    assert choose(0.005, 1.0, restarts=0, ran_s=0).reason == (
        "one holds up training for 5 ms, a failure is expected every 60 min"
    )
    assert "1% at most" in choose(1.0, 1.0, restarts=99, ran_s=0).reason


def test_interval_in_force_is_kept_while_it_is_near() -> None:
    def of(cost_s: float) -> int:
        return choose(cost_s, 1.0, restarts=0, ran_s=0, current=8).every

    assert [of(cost_s) for cost_s in (0.0005, 0.002, 0.005, 0.03)] == [2, 8, 8, 16]


def run(pace: Pace, iterations: range, *, cost_s: float, step_s: float = 1.0, at_s: float = 0.0) -> list[int]:
    """The iterations that are saved."""
    saved = []
    for iteration in iterations:
        if iteration % pace.at(iteration, at_s, restarts=0, ran_s=0.0) == 0:
            saved.append(iteration)
            pace.begin()
            pace.held(cost_s / 4)  # in the call
            pace.held(cost_s * 3 / 4)  # before the next step
            at_s += cost_s
        pace.held(0.0)  # before the steps that don't wait
        at_s += step_s
    return saved


def test_pace_saves_each_iteration_until_it_knows_the_cost() -> None:
    assert run(Pace(), range(1, 30), cost_s=0.005) == [1, 2, 3, 8, 16, 24]
