"""Every error this package raises on purpose.

FaultToleranceError
├── ConfigError (also a ValueError)     a user's mistake in the configuration or on the command line
├── RankMonitorClientError              a hook was called in a way the monitor can't follow
├── NotUnderLauncherError               a RankMonitorClientError: the script wasn't started with ft_launcher
└── ProtocolError                       a peer on a socket or board that violates the protocol
"""

from __future__ import annotations

from megatron_ft.core.printable import printable

_LONGEST_LINE = 1500


class FaultToleranceError(Exception):
    """Base of all errors of this package."""


class ConfigError(FaultToleranceError, ValueError):
    """A mistake of the user. The message is one line: what was given, and what is allowed."""

    def __init__(self, message: str = "") -> None:
        # what was given may hold anything, line feeds and what a terminal obeys included
        line = printable(message)
        # argparse lists all options that an abbreviation may mean: more than a line should hold
        super().__init__(line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}...")


class RankMonitorClientError(FaultToleranceError):
    """A call of the client that can't be honoured; nothing was changed by it."""


class NotUnderLauncherError(RankMonitorClientError):
    """The client found no monitor because the script wasn't started with ``ft_launcher``."""


class ProtocolError(FaultToleranceError):
    """Bytes that aren't ours, or of another protocol version."""
