"""The logger that the reference's in-process restarts inherit from."""

from __future__ import annotations

import logging
import os
import socket
import sys

__all__ = ["RankMonitorLogger"]


class RankMonitorLogger(logging.Logger):
    """Writes to standard error; what it reports of restarts goes to standard output, if that is asked for."""

    def __init__(
        self,
        name: str = "RankMonServer",
        level: int = logging.INFO,
        connected_rank: int | None = None,
        is_restarter_logger: bool = False,
    ) -> None:
        super().__init__(name, level)
        self.is_restarter_logger = is_restarter_logger
        self.propagate = False
        self.addHandler(logging.StreamHandler(sys.stderr))
        self.restarter_logger = logging.Logger(f"{name}.Restarter", logging.DEBUG)
        told = logging.StreamHandler(sys.stdout)
        told.setFormatter(logging.Formatter("[%(asctime)s] [ALWAYS] [%(name)s] %(message)s"))
        self.restarter_logger.addHandler(told)
        self.set_connected_rank(connected_rank)

    def set_connected_rank(self, rank: int | None) -> None:
        """Whose it is, in each line from here on."""
        self.rank = rank
        who = f"{self.name}{os.getpid()}@{socket.gethostname()}:{'<none>' if rank is None else rank}"
        for handler in self.handlers:
            handler.setFormatter(logging.Formatter(f"[%(asctime)s] [%(levelname)s] [{who}] %(message)s"))

    def log_for_restarter(self, message: str, *arguments: object) -> None:
        """A line about a restart."""
        if self.is_restarter_logger:
            self.restarter_logger.debug(message, *arguments)

    def log_restarter_event(self, message: str, *arguments: object) -> None:
        """The same."""
        self.log_for_restarter(message, *arguments)
