"""A clock that a test moves: code that reads the time sees it pass at once."""

from __future__ import annotations

import time

import pytest

from megatron_ft.rank.client import recorder


class Clock:
    """CLOCK_MONOTONIC, ahead by as long as the test has passed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._real_ns = time.monotonic_ns
        self._ahead_ns = 0
        patch.setattr(time, "monotonic", lambda: self.now_ns() / 1e9)
        patch.setattr(time, "monotonic_ns", self.now_ns)
        patch.setattr(recorder, "monotonic_ns", self.now_ns)

    def now_ns(self) -> int:
        return self._real_ns() + self._ahead_ns

    def pass_s(self, seconds: float) -> None:
        self._ahead_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
