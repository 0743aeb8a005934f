"""The campaign of planted bit flips, and that it would notice a segment that isn't checked."""

from __future__ import annotations

import pytest

from megatron_ft.ipc.memory import segment
from tests.memory.flips import plant


def test_thousand_planted_flips_are_all_found() -> None:
    assert plant(1002, seed=41) == {"tensor found": 334, "layout found": 334, "trailer found": 334}


def test_campaign_notices_digests_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "verify", lambda *_: None)
    monkeypatch.setattr(segment, "compare", lambda *_: None)
    assert plant(30, seed=41)["tensor MISSED"] == 10
