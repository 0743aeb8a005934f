"""Times: the longest duration, and the earliest due time. Pure."""

from __future__ import annotations

from typing import TypeVar

MAX_SECONDS = 1e9
"""Largest finite duration, in seconds (31 years). Its nanoseconds fit in 64 bits with room to spare."""

T = TypeVar("T", int, float)


def earliest(*times: T | None) -> T | None:
    """Return the earliest time, ignoring None; None if there is none."""
    return min((time for time in times if time is not None), default=None)
