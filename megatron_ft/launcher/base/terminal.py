"""Where a launcher's lines go: standard error, which may be gone, and may be shared with other launchers of the job."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable

from megatron_ft.core.wording import printable
from megatron_ft.launcher.base import lines

__all__ = ["put", "say", "sayer"]


def put(text: str) -> None:
    """Write these lines as they are."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # a terminal that is gone must not end the job; the event log has it


def say(text: str) -> None:
    """Print one line for the user, in which nothing of what came from elsewhere can act on a terminal."""
    put(f"{lines.PREFIX}{printable(text)}")


def sayer(*, has_others: bool) -> Callable[[str], None]:
    """``say``; where the job may have other nodes, with the time and this node's name, as their output is mixed."""
    if not has_others:
        return say
    host = socket.gethostname()
    return lambda text: say(lines.of_node(text, host, time.localtime()))
