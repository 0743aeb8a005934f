"""How long somebody hasn't answered, counted only while one could have heard it. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Silence"]


@dataclass
class Silence:
    """Of somebody whose last answer came at a time of its own.

    Args:
        longest_look_s: more than that from one look to the next isn't silence: we were stopped ourselves.
    """

    longest_look_s: float
    _last_answer: float | None = None
    _looked_s: float = 0.0
    _silent_s: float = 0.0

    def look(self, last_answer: float, now_s: float) -> float:
        """The seconds of silence. ``last_answer`` differs from that of the last look if there was a new one."""
        passed_s = min(max(0.0, now_s - self._looked_s), self.longest_look_s)
        self._silent_s = self._silent_s + passed_s if last_answer == self._last_answer else 0.0
        self._last_answer, self._looked_s = last_answer, now_s
        return self._silent_s
