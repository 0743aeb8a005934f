"""Rate limit for repeated lines: a frequent cause must not fill a log or a terminal. Pure."""

from __future__ import annotations

_AT_ONCE = 8
_EVERY_S = 60.0


class RateLimiter:
    """Admits a few lines at once and one a minute in the long run, and counts the others."""

    def __init__(self) -> None:
        self._left = float(_AT_ONCE)
        self._last_s: float | None = None
        self._suppressed = 0

    def admit(self, text: str, now_s: float) -> str | None:
        """Return the line to print now, with the number of lines suppressed before it; None to print nothing.

        ``now_s``: seconds on a clock that never goes back.
        """
        passed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._left = min(_AT_ONCE, self._left + passed_s / _EVERY_S)
        if self._left < 1:
            self._suppressed += 1
            return None
        self._left -= 1
        suppressed, self._suppressed = self._suppressed, 0
        notes = [f"{suppressed} like it since the last such line"] if suppressed else []
        if self._left < 1:
            notes.append("from now on one a minute")
        return f"{text} ({'; '.join(notes)})" if notes else text
