"""Facts about the user's script: when it began (in forked ranks), and whether it reports iterations."""

from __future__ import annotations

import time

_began_ns = 0
_reports_iterations = False


def note_user_code() -> None:
    global _began_ns
    _began_ns = time.monotonic_ns()


def user_code_began_ns() -> int:
    """Return CLOCK_MONOTONIC nanoseconds; 0 in a fresh interpreter, which begins with the user's code."""
    return _began_ns


def note_iterations(are_reported: bool) -> None:
    """Note whether the script reports iterations. If so, a "step" doesn't prove training: it may be an evaluation."""
    global _reports_iterations
    _reports_iterations = are_reported


def reports_iterations() -> bool:
    """Return True if the script reports iterations. False also if nothing was noted."""
    return _reports_iterations
