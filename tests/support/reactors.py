"""A reactor for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ft.link.reactor import Reactor

__all__ = ["reactor"]


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    """Closed afterwards."""
    made = Reactor()
    yield made
    made.close()
