"""Which voters have lately been at a coordinator that doesn't lead: they search, and may all wait here. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

__all__ = ["Visitors"]

_LATELY_S = 10.0
"""A launcher in search is back at each address within this time, unless several hosts don't answer."""


class Visitors:
    """Of one coordinator, since the last decision. Times are seconds of its clock."""

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}

    def are_here(self, places: Iterable[int], now_s: float) -> None:
        """The voters at these places are connected now."""
        self._last_s.update(dict.fromkeys(places, now_s))

    def lately(self, now_s: float, left: Container[int]) -> list[int]:
        """Places of all that were here in the last 10 s, without those that have ``left`` the job."""
        last_s = self._last_s
        return [place for place, at_s in last_s.items() if now_s - at_s <= _LATELY_S and place not in left]
