"""A learned timeout that has ended a rank is doubled for the next cycle: none ends a healthy job twice. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

RAISED_TIMEOUTS = "FT_RAISED_TIMEOUTS"
"""The environment variable through which the ranks of the next cycle learn it."""
_MOST = 1e6


class RaisedTimeouts:
    """The learned timeouts that ended ranks of this node, over the cycles of its launcher."""

    def __init__(self) -> None:
        self._kills: dict[str, tuple[int, float]] = {}

    def note_kill(self, name: str, cycle: int) -> None:
        """The learned timeout of a section, or of the time in none, has ended a rank of this node in this cycle."""
        last, factor = self._kills.get(name, (-2, 1.0))
        if last != cycle:
            self._kills[name] = cycle, min(2.0 * (factor if last == cycle - 1 else 1.0), _MOST)

    def factors(self, cycle: int) -> dict[str, float]:
        """By how much the ranks of this cycle raise which of them: those that ended the last one."""
        return {name: factor for name, (last, factor) in self._kills.items() if last == cycle - 1}

    def environment(self, cycle: int) -> dict[str, str]:
        """The environment variable for the ranks of this cycle."""
        factors = self.factors(cycle)
        return {RAISED_TIMEOUTS: json.dumps(factors)} if factors else {}


def from_text(text: str) -> Mapping[str, float]:
    """The factors in the variable's text; empty if it isn't such a text."""
    try:
        factors = json.loads(text) if text else {}
    except ValueError:
        return {}
    if not isinstance(factors, dict):
        return {}
    return {
        str(name): float(factor)
        for name, factor in factors.items()
        if isinstance(factor, (int, float)) and math.isfinite(factor) and 1.0 <= factor <= _MOST
    }
