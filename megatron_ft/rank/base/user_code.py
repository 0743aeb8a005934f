"""What is known of the user's script in this process: when it began (in forked ranks), if it reports iterations."""

from __future__ import annotations

import time

_began_ns = 0
_reports_iterations = False


def note_user_code() -> None:
    """Note that the script begins now."""
    global _began_ns
    _began_ns = time.monotonic_ns()


def user_code_began_ns() -> int:
    """CLOCK_MONOTONIC nanoseconds; 0 in a fresh interpreter, which begins with the user's code."""
    return _began_ns


def note_iterations(are_reported: bool) -> None:
    """Note whether the script reports iterations; if so, a "step" doesn't show that it trains: it may evaluate."""
    global _reports_iterations
    _reports_iterations = are_reported


def reports_iterations() -> bool:
    """Whether the script will report iterations. If nothing was noted it still may."""
    return _reports_iterations
