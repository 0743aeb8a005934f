"""Names of nvidia-resiliency-ext that this package serves but doesn't use: restarts in a process, helpers."""

from __future__ import annotations

import enum
import importlib.util
import logging
import os
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

from megatron_ft.ipc.linux.processes import read_stat

__all__ = [
    "InvalidStateTransitionException",
    "RankMonitorLogger",
    "RankMonitorState",
    "RankMonitorStateMachine",
    "is_module_available",
    "is_process_alive",
    "wait_for_mp_events",
]


class InvalidStateTransitionException(Exception):
    """Raised for a state transition that isn't allowed."""


class RankMonitorState(enum.Enum):
    """State of a restart within the process."""

    UNINITIALIZED = 1
    INITIALIZE = 2
    HANDLING_START = 3
    HANDLING_PROCESSING = 4
    HANDLING_COMPLETED = 5
    FINALIZED = 6
    ABORTED = 7


_S = RankMonitorState
_RESTARTING = (_S.HANDLING_START, _S.HANDLING_PROCESSING)
_NEXT = {
    _S.UNINITIALIZED: {_S.INITIALIZE, _S.FINALIZED},
    _S.INITIALIZE: {_S.HANDLING_START, _S.FINALIZED},
    _S.HANDLING_START: {_S.HANDLING_COMPLETED, _S.HANDLING_PROCESSING, _S.ABORTED},
    _S.HANDLING_PROCESSING: {_S.HANDLING_COMPLETED, _S.HANDLING_PROCESSING, _S.ABORTED},
    _S.HANDLING_COMPLETED: {_S.HANDLING_START, _S.FINALIZED},
    _S.ABORTED: {_S.FINALIZED},
    _S.FINALIZED: {_S.FINALIZED},
}
_TOLD_AS = {
    _S.INITIALIZE: "initialize",
    _S.HANDLING_START: "handling stage=starting",
    _S.HANDLING_PROCESSING: "handling stage=processing",
    _S.HANDLING_COMPLETED: "handling stage=completed",
    _S.FINALIZED: "finalized",
    _S.ABORTED: "aborted",
}
# next state by current state, for each event
_PROGRESS = {_S.UNINITIALIZED: _S.INITIALIZE, **dict.fromkeys(_RESTARTING, _S.HANDLING_COMPLETED)}
_LOST = {
    **dict.fromkeys((_S.INITIALIZE, _S.HANDLING_COMPLETED), _S.HANDLING_START),
    **dict.fromkeys(_RESTARTING, _S.ABORTED),
}
_CHECKED = dict.fromkeys(_RESTARTING, _S.HANDLING_PROCESSING)
_SIGNAL = {**dict.fromkeys(_S, _S.FINALIZED), **dict.fromkeys(_RESTARTING, _S.ABORTED)}
del _SIGNAL[_S.UNINITIALIZED]


class RankMonitorStateMachine:
    """State machine of one rank. ``logger.log_restarter_event`` is called with each change."""

    def __init__(self, logger: Any) -> None:
        self.state = _S.UNINITIALIZED
        self.logger = logger

    def is_restarting(self) -> bool:
        """Return True while a restart has begun and isn't completed."""
        return self.state in _RESTARTING

    def handle_heartbeat_msg(self) -> None:
        self._follow("heartbeat", _PROGRESS, ignored_in=(_S.INITIALIZE, _S.HANDLING_COMPLETED))

    def handle_section_msg(self) -> None:
        self._follow("section", _PROGRESS, ignored_in=(_S.INITIALIZE, _S.HANDLING_COMPLETED))

    def periodic_restart_check(self) -> None:
        self._follow("periodic_restart_check", _CHECKED, ignored_in=())

    def handle_ipc_connection_lost(self) -> None:
        self._follow("handle_ipc_connection_lost", _LOST, ignored_in=(_S.ABORTED, _S.UNINITIALIZED, _S.FINALIZED))

    def handle_signal(self) -> None:
        self._follow("handle_signal", _SIGNAL, ignored_in=(_S.UNINITIALIZED,))

    def can_transition_to(self, new_state: RankMonitorState) -> bool:
        return new_state in _NEXT[self.state]

    def transition_to(self, new_state: RankMonitorState) -> None:
        """Change the state, and report it to ``logger``.

        Raises:
            InvalidStateTransitionException: ``new_state`` may not come next.
        """
        if not self.can_transition_to(new_state):
            problem = f"Invalid transition attempted from {self.state} to {new_state}"
            self.logger.log_restarter_event(problem)
            raise InvalidStateTransitionException(problem)
        self.logger.log_restarter_event(f"[NestedRestarter] name=[InJob] state={_TOLD_AS[new_state]}")
        self.state = new_state

    def _follow(
        self, event: str, table: dict[RankMonitorState, RankMonitorState], *, ignored_in: tuple[RankMonitorState, ...]
    ) -> None:
        if self.state in ignored_in:
            return
        if self.state not in table:
            raise AssertionError(f"unexpected {event} in {self.state}")
        self.transition_to(table[self.state])


class RankMonitorLogger(logging.Logger):
    """Logs to standard error; restart events go to standard output, if ``is_restarter_logger``."""

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
        """Name this rank in each line from now on."""
        self.rank = rank
        who = f"{self.name}{os.getpid()}@{socket.gethostname()}:{'<none>' if rank is None else rank}"
        for handler in self.handlers:
            handler.setFormatter(logging.Formatter(f"[%(asctime)s] [%(levelname)s] [{who}] %(message)s"))

    def log_for_restarter(self, message: str, *arguments: object) -> None:
        """Log a line about a restart."""
        if self.is_restarter_logger:
            self.restarter_logger.debug(message, *arguments)

    def log_restarter_event(self, message: str, *arguments: object) -> None:
        """Alias of ``log_for_restarter``."""
        self.log_for_restarter(message, *arguments)


def is_module_available(module: str) -> bool:
    """Return True if the module can be found, without importing it."""
    return importlib.util.find_spec(module) is not None


def is_process_alive(pid: int) -> bool:
    """Return True if the process is alive; a zombie isn't."""
    stat = read_stat(pid)
    return stat is not None and stat.state != "Z"


def wait_for_mp_events(events: Iterable[Any], timeout: float = 60) -> None:
    """Wait until all of these events of ``multiprocessing`` are set.

    Raises:
        RuntimeError: an event isn't set after ``timeout`` seconds in all.
    """
    deadline = time.monotonic() + timeout
    for event in events:
        if not event.wait(max(0.0, deadline - time.monotonic())):
            raise RuntimeError(f"an event wasn't set in {timeout:g} s")
