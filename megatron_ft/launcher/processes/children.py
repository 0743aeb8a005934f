"""The processes that the launcher itself has started and still needs: no leftovers of a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection

__all__ = ["Children"]


class Children:
    """Of one launcher. Each part of it that starts processes adds what names their ids."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Collection[int]]] = []

    def add(self, pids: Callable[[], Collection[int]]) -> None:
        """``pids`` is asked for the process ids each time they are needed."""
        self._sources.append(pids)

    def pids(self) -> set[int]:
        """The ids of all of them now."""
        return {pid for source in self._sources for pid in source()}
