"""The next time at which something is due, of several that may not be due at all. Pure."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["earliest"]

T = TypeVar("T", int, float)


def earliest(*times: T | None) -> T | None:
    """The first of these times; None if all are."""
    return min((time for time in times if time is not None), default=None)
