"""The campaign of planted bit flips."""

from __future__ import annotations

from tests.memory.flips import plant, plant_in_flight


def test_thousand_planted_flips_are_all_found() -> None:
    assert plant(1002, seed=41) == {"tensor found": 334, "layout found": 334, "trailer found": 334}


def test_planted_flips_in_copies_on_their_way_are_all_found() -> None:
    assert plant_in_flight(100, seed=41) == {"fetched found": 50, "sent found": 50}
