"""What a look at the collectives counts."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_ft.link.base import layout
from megatron_ft.rank.collectives import watch
from megatron_ft.rank.collectives.watch import CollectiveWatch
from megatron_ft.rank.crash_reporter.flight_recorder import Counts, GroupCounts


class Watched:
    """A watch of a rank; ``counts``: what torch counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counts | None = {"0/0": GroupCounts(1, 1)}
        self.board: Any = SimpleNamespace(words=[0] * layout.SECTION_TABLE, put_place=lambda place: None)
        monkeypatch.setattr(watch, "counts", lambda: self.counts)
        monkeypatch.setattr(watch, "calls_hooks", False)  # another test of this process may have called some
        self._watch = CollectiveWatch()
        self._watch.own_board = self.board

    def look(self, entered: int, completed: int, started: int | None = None, *, is_late: bool = False) -> None:
        self.counts = {"0/0": GroupCounts(1, 1), "0/1": GroupCounts(entered, completed, started)}
        self._watch.look(is_late=is_late)

    @property
    def looks(self) -> tuple[int, int, int]:
        """Looks, those that found a collective, and how many of them began to."""
        words = self.board.words
        return words[layout.W_LOOKS], words[layout.W_LOOKS_WAITING], words[layout.W_WAITS]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_collective_that_was_only_enqueued_is_not_waited_in_where_torch_sees_the_start(watched: Watched) -> None:
    watched.look(9, 3, 3)
    assert watched.looks == (1, 0, 0)
    watched.look(9, 3, 4)
    assert watched.looks == (2, 1, 1)


def test_rank_that_still_imports_is_not_silent(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    words = watched.board.words
    watched.look(1, 1)
    seen_ns = words[layout.W_COLLECTIVE_AT]
    watched.look(1, 1)
    assert words[layout.W_COLLECTIVE_AT] == seen_ns
    monkeypatch.setitem(sys.modules, "still_importing", ModuleType("still_importing"))
    watched.look(1, 1)
    assert words[layout.W_COLLECTIVE_AT] > seen_ns


def test_look_that_the_interpreter_has_delayed_found_no_collective(watched: Watched) -> None:
    watched.look(2, 1, is_late=True)
    assert watched.looks == (1, 0, 0)


def test_no_stamp_lies_before_the_start_of_a_board_that_began_during_the_look(watched: Watched) -> None:
    words = watched.board.words
    words[layout.W_START] = began_ns = time.monotonic_ns() + 10**9
    watched.look(1, 1)
    assert (words[layout.W_COLLECTIVE_AT], words[layout.W_COLLECTIVES_SEEN_AT]) == (began_ns, began_ns)
