"""Which voters have been at a coordinator lately that doesn't lead: they look for one, and may all wait here. Pure."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Visitors"]

_LATELY_S = 10.0
"""A launcher that finds no coordinator comes back to each address within this time."""


class Visitors:
    """Of one coordinator, since the last decision. Times are seconds of its clock."""

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}

    def are_here(self, places: Iterable[int], now_s: float) -> None:
        """The voters at these places are connected now."""
        self._last_s.update(dict.fromkeys(places, now_s))

    def lately(self, now_s: float) -> list[int]:
        """Places of all that were here in the last 10 s."""
        return [place for place, last_s in self._last_s.items() if now_s - last_s <= _LATELY_S]
