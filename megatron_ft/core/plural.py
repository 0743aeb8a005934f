"""A number of things in a line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["counted", "listed"]


def counted(number: int, noun: str) -> str:
    """As in "1 node" and "2 nodes"; for nouns whose plural takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(parts: Sequence[str], *, most: int = 8, joint: str = ", ") -> str:
    """The first ``most`` of them, as in "a, b and 3 more", or "a; b; and 3 more"."""
    shown, more = joint.join(parts[:most]), len(parts) - most
    return shown if more <= 0 else f"{shown}{joint.replace(',', '')}and {more} more"
