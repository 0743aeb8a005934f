"""Each folder of the package has a budget of lines and statements, which only goes down."""

from __future__ import annotations

from tests.support.budget import PATH, budget, exceeded, sizes


def test_no_room_is_larger_than_its_budget() -> None:
    grown = list(exceeded(sizes(), budget()))
    assert not grown, f"{grown}: {PATH.name} only goes down, make room elsewhere in the same folder"


def test_rows_are_those_of_the_folders() -> None:
    assert budget().keys() == sizes().keys()
