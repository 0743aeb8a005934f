"""What is known of the user's script in this process: when it began (in ranks that were forked), and what it tells."""

from __future__ import annotations

import time

__all__ = ["note_iterations", "note_user_code", "tells_iterations", "user_code_began_ns"]

_began_ns = 0
_tells_iterations = False


def note_user_code() -> None:
    """It begins now."""
    global _began_ns
    _began_ns = time.monotonic_ns()


def user_code_began_ns() -> int:
    """CLOCK_MONOTONIC nanoseconds; 0 in a fresh interpreter, which begins with the user's code."""
    return _began_ns


def note_iterations(are_told: bool) -> None:
    """Its iterations will be reported, or not; if so, a "step", of an evaluation say, doesn't mean that it trains."""
    global _tells_iterations
    _tells_iterations = are_told


def tells_iterations() -> bool:
    """Whether the script has said that it will report iterations; it may report them without saying so."""
    return _tells_iterations
