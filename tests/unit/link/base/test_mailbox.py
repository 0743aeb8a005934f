"""Effects in order, whatever they lead to."""

from __future__ import annotations

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
    assert mailbox.post([5]), "it isn't busy for ever"
    closed = Mailbox(handled.append, is_open=lambda: 6 not in handled)
    closed.post([6, 7])
    assert handled == [1, 2, 11, 12, 5, 6]
