"""Effects in order, whatever they lead to."""

from __future__ import annotations

import pytest

from megatron_ft.link.base.mailbox import Mailbox


def test_effect_posted_by_an_effect_is_handled_after_those_due_before() -> None:
    handled: list[int] = []
    posted: list[bool] = []

    def handle(item: int) -> None:
        handled.append(item)
        if item < 3:
            posted.append(mailbox.post([item + 10]))

    mailbox = Mailbox(handle)
    assert mailbox.post([1, 2])
    assert handled == [1, 2, 11, 12]
    assert posted == [False, False]


def test_mailbox_that_closed_or_failed_handles_the_rest_later_or_never() -> None:
    handled: list[int] = []

    def handle(item: int) -> None:
        handled.append(item)
        if item == 5:
            raise ValueError("five")

    mailbox = Mailbox(handle, is_open=lambda: 2 not in handled)
    mailbox.post([1, 2, 3])
    assert handled == [1, 2]
    mailbox = Mailbox(handle)
    with pytest.raises(ValueError, match="five"):
        mailbox.post([5, 6])
    assert mailbox.post([7])  # it isn't busy for ever
    assert handled == [1, 2, 5, 6, 7]
