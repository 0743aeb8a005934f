"""Texts and tables on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable

_LEAST_WIDTH = 160


def terminal() -> Console:
    """Return the console for tables."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and console.width < _LEAST_WIDTH:
        # rich assumes 80 columns of a pipe, where lines may have any length
        console = Console(highlight=False, width=_LEAST_WIDTH)
    return console


def follow(
    frame: Callable[[], tuple[ConsoleRenderable | str, bool]], least_s: float, console: Console | None = None
) -> None:
    """Redraw what ``frame`` returns until it says that nothing follows, or until Ctrl-C.

    Pauses are of ``least_s`` seconds at least; frames take at most a fifth of the time.
    """
    from rich.live import Live
    from rich.text import Text

    with Live(console=terminal() if console is None else console, auto_refresh=False) as live:
        try:
            goes_on = True
            while goes_on:
                began_s = time.monotonic()
                drawn, goes_on = frame()
                live.update(Text(drawn) if isinstance(drawn, str) else drawn, refresh=True)
                if goes_on:
                    time.sleep(max(least_s, 4 * (time.monotonic() - began_s)))
        except KeyboardInterrupt:
            return  # the normal way to leave


def took(seconds: float | None) -> str:
    """Format seconds, as milliseconds below one second; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s"


def duration(seconds: float) -> str:
    """Format seconds for a person: "0.4 s", "42 s", "3 min 20 s", "2 h 05 min", "3 d 4 h"."""
    if seconds < 10:
        return f"{int(seconds * 10) / 10:.1f} s"
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes == 0:
        return f"{whole} s"
    if hours == 0:
        return f"{minutes} min {whole % 60:02} s"
    return f"{hours} h {minutes % 60:02} min" if days < 2 else f"{days} d {hours % 24} h"
