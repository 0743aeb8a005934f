"""Signals in words. Pure."""

from __future__ import annotations

import signal

__all__ = ["signal_name"]


def signal_name(number: int) -> str:
    """As in "SIGKILL"; "signal 35" for one without a name (a real-time one, or none of this system)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
