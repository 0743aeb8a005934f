"""What a shell does to a command that it starts with "&", undone."""

from __future__ import annotations

import signal

__all__ = ["heed_the_terminal"]


def heed_the_terminal() -> None:
    """Heed SIGINT and SIGQUIT again, which it ignores; all that this process starts would inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
