"""Sections around methods that have no hooks, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning.pytorch", reason="the extra megatron_ft[lightning] isn't installed")

from megatron_ft.integrations.lightning_sections import Sections
from megatron_ft.rank.base import say
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


def test_undo_puts_everything_back(sections: Sections) -> None:
    owner, other = Owner(), Owner()
    own_method = other.work
    other.work = own_method  # type: ignore[method-assign]
    for each in (owner, other, owner):
        sections.wrap(each, "work", "step")
    sections.end()
    assert "work" not in vars(owner)
    assert other.work is own_method
    sections.end()


def test_method_wrapped_again_by_others_keeps_their_wrapper(client: FakeClient, sections: Sections) -> None:
    owner = Owner()
    sections.wrap(owner, "work", "step")
    ours = owner.work
    owner.work = lambda number: ours(number) + 1  # type: ignore[method-assign, assignment]
    sections.end()
    assert owner.work(4) == 9
    assert client.calls == []


def test_a_client_that_refuses_does_not_end_the_training(
    client: FakeClient, sections: Sections, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Owner()
    sections.wrap(owner, "work", "step")
    say.forget()
    owner.inside = client.end_all_sections  # the user's own code meddles
    assert owner.work(4) == 8
    assert "already closed" in capsys.readouterr().err
    assert owner.work(5) == 10
