"""A node that isn't fit stands aside: when it is looked at again, and how often that is told. Pure."""

from __future__ import annotations

__all__ = ["is_told", "retry_delay_s"]

_FIRST_S = 2.0
_LONGEST_S = 60.0


def retry_delay_s(failures: int) -> float:
    """From the last of so many failed checks in a row to the next one."""
    return float(min(_LONGEST_S, _FIRST_S * 2.0 ** min(failures - 1, 10)))


def is_told(failures: int, *, is_new: bool) -> bool:
    """Whether the last of so many failures is worth a line: ever more seldom, if it is as the one before it was."""
    return is_new or failures & (failures - 1) == 0
