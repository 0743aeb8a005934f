"""Lines for users and debug messages, through ``logging``: megatron_ft.launcher, .monitor, .coordinator and .rank.

A logger that has no handler when its first line comes, nor has ``megatron_ft``, gets one that writes where lines always
went. An application that adds its own before has all lines.
A process that prints nothing never imports ``logging``: a monitor runs beside every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_ft.link.base.wording import printable
from megatron_ft.link.standard_error import put

if TYPE_CHECKING:
    import logging

DEBUG, INFO, NOTICE, WARNING, ERROR = 10, 20, 25, 30, 40
"""Levels of ``logging``; NOTICE is for information of a rank that goes to standard error."""
LEVEL_VARIABLE = "MEGATRON_FT_LOG_LEVEL"
"""Set by a launcher whose user has chosen a level, for the coordinator that it starts."""
_PACKAGE = "megatron_ft"
_MOST_CHARACTERS = 1000
"""Longest debug message, in characters."""


class Log:
    """One logger of this package. ``write(level, text)`` prints a line where no application takes it."""

    def __init__(self, name: str, prefix: str, write: Callable[[int, str], None]) -> None:
        self._name = f"{_PACKAGE}.{name}"
        self._prefix = prefix
        self._write = write
        self._logger: logging.Logger | None = None

    def set_level(self, level: int) -> None:
        """Log records of this level and above."""
        if level != INFO or "logging" in sys.modules:
            self._get().setLevel(level)

    def debug(self, what: str, *about: object) -> None:
        """Log a message at DEBUG, with the text of objects that are only looked at if it is logged."""
        if self._logger is None and "logging" not in sys.modules:
            return
        logger = self._get()
        if logger.isEnabledFor(DEBUG):
            text = printable(" ".join([what, *map(str, about)]))[:_MOST_CHARACTERS]
            logger.debug("%s", f"{self._prefix}DEBUG: {text}")

    def say(self, level: int, text: str) -> None:
        """Log a line for the user, after the prefix of this process."""
        self.put(level, f"{self._prefix}{text}")

    def put(self, level: int, text: str) -> None:
        """Log lines for the user as they are."""
        self._get().log(level, "%s", text)

    def _get(self) -> logging.Logger:
        if self._logger is not None:
            return self._logger
        import logging

        write, logger, package = self._write, logging.getLogger(self._name), logging.getLogger(_PACKAGE)

        class Default(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                write(record.levelno, record.getMessage())

        if not (logger.handlers or package.handlers):
            logger.addHandler(Default())
            logger.propagate = False  # a handler of the root logger would print each line a second time
        if logger.level == package.level == logging.NOTSET:
            logger.setLevel(INFO)
        self._logger = logger
        return logger


def _to_standard_error(_level: int, text: str) -> None:
    put(text)


def _to_user(level: int, text: str) -> None:
    """Write a line of a rank: to standard output, or if it is more or less than information to standard error."""
    print(text, file=sys.stdout if level == INFO else sys.stderr, flush=True)


LAUNCHER = Log("launcher", "[ft_launcher] ", _to_standard_error)
MONITOR = Log("monitor", "[ft_monitor] ", _to_standard_error)
COORDINATOR = Log("coordinator", "megatron-ft coordinator: ", _to_standard_error)
RANK = Log("rank", "FT: ", _to_user)
