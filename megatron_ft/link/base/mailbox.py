"""Effects in order. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Queue of a machine's effects: effects of an effect follow those already queued.

    Calls ``handle`` with one item at a time, while ``is_open``; ``handle`` may post more.
    """

    def __init__(self, handle: Callable[[T], object], is_open: Callable[[], bool] = lambda: True) -> None:
        self._handle = handle
        self._is_open = is_open
        self._items: deque[T] = deque()
        self._is_busy = False

    def post(self, items: Iterable[T]) -> bool:
        """Handle the items. Return False from within ``handle``: they are only queued."""
        self._items.extend(items)
        if self._is_busy:
            return False
        self._is_busy = True
        try:
            while self._items and self._is_open():
                self._handle(self._items.popleft())
        finally:
            self._is_busy = False
        return True
