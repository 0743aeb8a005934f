"""What a shell does to a command that it starts with "&", and what nohup does, undone."""

from __future__ import annotations

import signal

__all__ = ["heed_the_terminal"]


def heed_the_terminal() -> None:
    """Heed SIGINT, SIGQUIT and SIGHUP again, which are ignored; all that this process starts would inherit that."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
