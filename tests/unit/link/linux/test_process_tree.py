"""A helper that somebody stopped is replaced, but not one that was stopped and continued with its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_ft.link import process_tree


class Later:
    """A reactor whose timers the test rings."""

    def __init__(self) -> None:
        self.due: list[Callable[[], object]] = []

    def call_later(self, _delay_s: float, call: Callable[[], object]) -> None:
        self.due.append(call)


@pytest.mark.parametrize(
    ("states", "is_replaced"), [((True, True), True), ((True, False), False), ((False, True), False)]
)
def test_helper_is_replaced_only_if_it_stays_stopped(
    states: tuple[bool, bool], is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: Any = Later()
    answers = list(states)
    monkeypatch.setattr(process_tree, "is_stopped", lambda pid: pid == 7 and answers.pop(0))
    replaced: list[int] = []
    process_tree.replace_if_stopped(later, lambda: 7, lambda: replaced.append(7))
    assert replaced == []
    for call in later.due:
        call()
    assert bool(replaced) == is_replaced


def test_helper_that_has_ended_meanwhile_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    later: Any = Later()
    monkeypatch.setattr(process_tree, "is_stopped", lambda _pid: True)
    pids = [7, None]
    process_tree.replace_if_stopped(later, lambda: pids.pop(0), lambda: pytest.fail("replaced"))
    later.due[0]()
