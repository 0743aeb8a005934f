"""How often the same is said: a cause that comes a million times must not fill a log or a terminal. Pure."""

from __future__ import annotations

_AT_ONCE = 8
_EVERY_S = 60.0


class RateLimiter:
    """Lets a few through at once, and one a minute in the long run; the others are counted."""

    def __init__(self) -> None:
        self._left = float(_AT_ONCE)
        self._last_s: float | None = None
        self._unsaid = 0

    def admit(self, text: str, now_s: float) -> str | None:
        """The text to be said now, with the number of those that weren't before it; None: it isn't to be said.

        ``now_s``: seconds on a clock that only goes forward.
        """
        passed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._left = min(_AT_ONCE, self._left + passed_s / _EVERY_S)
        if self._left < 1:
            self._unsaid += 1
            return None
        self._left -= 1
        unsaid, self._unsaid = self._unsaid, 0
        told = [f"{unsaid} like it since the last such line"] if unsaid else []
        if self._left < 1:
            told.append("from now on one a minute")
        return f"{text} ({'; '.join(told)})" if told else text
