"""Sections around methods that have no hooks, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

from megatron_ft.integrations.lightning_sections import Sections
from tests.support.training import FakeClient, clean_environment

__all__ = ["clean_environment"]  # a fixture


class Owner:
    """Something with a method."""

    def __init__(self) -> None:
        self.inside: Any = None

    def work(self, number: int) -> int:
        """Doubles a number, and calls ``inside`` before."""
        if self.inside is not None:
            self.inside()
        return 2 * number


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def sections(client: FakeClient) -> Sections:
    return Sections(client)


def test_method_wrapped_again_by_others_keeps_their_wrapper(client: FakeClient, sections: Sections) -> None:
    owner = Owner()
    sections.wrap(owner, "work", "step")
    ours = owner.work
    owner.work = lambda number: ours(number) + 1  # type: ignore[method-assign, assignment]
    sections.end()
    assert owner.work(4) == 9
    assert client.calls == []
