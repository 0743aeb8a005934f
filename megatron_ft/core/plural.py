"""A number of things in a line. Pure."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str) -> str:
    """As in "1 node" and "2 nodes"; for nouns whose plural takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
