"""The campaign of planted bit flips, and that it would notice a segment that isn't checked."""

from __future__ import annotations

import pytest

from megatron_ft.link import secure_channel
from megatron_ft.memory.base import segment
from tests.memory.flips import plant, plant_in_flight


def test_thousand_planted_flips_are_all_found() -> None:
    assert plant(1002, seed=41) == {"tensor found": 334, "layout found": 334, "trailer found": 334}


def test_planted_flips_in_copies_on_their_way_are_all_found() -> None:
    assert plant_in_flight(100, seed=41) == {"fetched found": 50, "sent found": 50}


def test_campaign_notices_copies_whose_seals_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_channel.hmac, "compare_digest", lambda *_: True)
    found = plant_in_flight(64, seed=41)
    assert found["sent MISSED"] > 0
    assert found["fetched MISSED"] > 0


def test_campaign_notices_digests_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "verify", lambda *_: None)
    assert plant(30, seed=41)["tensor MISSED"] == 10
