"""Fault plans: what may be written, what is drawn, and what is due."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ft.errors import ConfigError
from megatron_ft.rank.faults.plan import PlannedFault, read_fault_plan

FAULT = {"cycle": 0, "rank": 1, "iteration": 25, "type": "rank_killed"}


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[PlannedFault, ...]]:
    """Read a document as the plan of a job."""
    monkeypatch.chdir(tmp_path)

    def read(document: Any, world_size: int = 8) -> tuple[PlannedFault, ...]:
        Path("plan.yaml").write_text(yaml.safe_dump(document))
        return read_fault_plan("plan.yaml", world_size)

    return read


def test_chance_is_the_same_for_the_same_seed_and_differs_between_seeds(read: Callable[..., Any]) -> None:
    open_faults = [{"rank": "random", "iteration": [20, 40], "type": "random", "cycle": at} for at in range(200)]
    drawn, again, other = (read({"faults": open_faults, "seed": seed}) for seed in (1, 1, 2))
    assert drawn == again != other
    assert {fault.rank for fault in drawn} == set(range(8))
    assert {fault.iteration for fault in drawn} == set(range(20, 41))
    assert {fault.type for fault in drawn} == {"rank_killed", "rank_hung"}


def test_chance_hasnt_changed(read: Callable[..., Any]) -> None:
    """A seed in somebody's notes means the same fault next year."""
    (fault,) = read({"faults": [{"rank": "random", "iteration": [0, 1000], "type": "random"}], "seed": 7}, 64)
    assert fault == PlannedFault(cycle=0, rank=7, iteration=126, type="rank_hung")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "Expected `object`, got `null`"),
        ({}, "missing required field `faults`"),
        ({"faults": [], "seed": -1}, "Expected `int` >= 0 - at `$.seed`"),
        ({"faults": [FAULT, {**FAULT, "itration": 3}]}, "unknown field `itration` - at `$.faults[1]`"),
        ({"faults": [{**FAULT, "type": "rank_kiled"}]}, "Invalid enum value 'rank_kiled' - at `$.faults[0].type`"),
        ({"faults": [{**FAULT, "iteration": [1]}]}, "at `$.faults[0].iteration`"),
        ({"faults": [{**FAULT, "iteration": [9, 3]}]}, "the range [9, 3] is empty"),
        ({"faults": [{**FAULT, "seconds": 3}]}, "seconds is only for type 'slow', not 'rank_killed'"),
        ({"faults": [{**FAULT, "type": "slow", "seconds": float("inf")}]}, "at `$.faults[0].seconds`"),
        ({"faults": [{**FAULT, "rank": 8}]}, "fault 1: rank must be below the number of ranks, 8, not 8"),
        ({"faults": [FAULT, FAULT]}, "fault 2: rank 1 already has one after iteration 25 of cycle 0"),
    ],
)
def test_mistakes_are_one_line_that_says_what_is_allowed(document: Any, message: str, read: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as error:
        read(document)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("plan.yaml: ")
    assert "a type (rank_killed, rank_hung, slow, exception or 'random')" in str(error.value) or "fault " in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00\x01", "plan.yaml: the fault plan isn't"),
        (b"faults: !!python/object/apply:os.system [true]", "isn't YAML"),
    ],
)
def test_file_that_is_no_plan_is_refused_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_fault_plan(file, 2)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
