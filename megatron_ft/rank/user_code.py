"""When the user's script began in this process, where that is known: in ranks that were forked."""

from __future__ import annotations

import time

__all__ = ["note_user_code", "user_code_began_ns"]

_began_ns = 0


def note_user_code() -> None:
    """It begins now."""
    global _began_ns
    _began_ns = time.monotonic_ns()


def user_code_began_ns() -> int:
    """CLOCK_MONOTONIC nanoseconds; 0 in a fresh interpreter, which begins with the user's code."""
    return _began_ns
