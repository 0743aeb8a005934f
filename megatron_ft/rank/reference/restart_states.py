"""The states of the reference's layered restarts, for callers that follow them. Nothing of this package uses them."""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["InvalidStateTransitionException", "RankMonitorState", "RankMonitorStateMachine"]


class InvalidStateTransitionException(Exception):
    """From this state that one can't be reached."""


class RankMonitorState(enum.Enum):
    """Where a restart inside the process stands."""

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
# by what happens: the state that it leads to, from each in which it may
_PROGRESS = {_S.UNINITIALIZED: _S.INITIALIZE, **dict.fromkeys(_RESTARTING, _S.HANDLING_COMPLETED)}
_LOST = {
    **dict.fromkeys((_S.INITIALIZE, _S.HANDLING_COMPLETED), _S.HANDLING_START),
    **dict.fromkeys(_RESTARTING, _S.ABORTED),
}
_CHECKED = dict.fromkeys(_RESTARTING, _S.HANDLING_PROCESSING)
_SIGNAL = {**dict.fromkeys(_S, _S.FINALIZED), **dict.fromkeys(_RESTARTING, _S.ABORTED)}
del _SIGNAL[_S.UNINITIALIZED]


class RankMonitorStateMachine:
    """Follows one rank. ``logger`` has a method ``log_restarter_event``, which is called with each change."""

    def __init__(self, logger: Any) -> None:
        self.state = _S.UNINITIALIZED
        self.logger = logger

    def is_restarting(self) -> bool:
        """Whether a restart has begun and isn't completed."""
        return self.state in _RESTARTING

    def handle_heartbeat_msg(self) -> None:
        """A heartbeat came."""
        self._follow("heartbeat", _PROGRESS, ignored_in=(_S.INITIALIZE, _S.HANDLING_COMPLETED))

    def handle_section_msg(self) -> None:
        """A section was opened or closed."""
        self._follow("section", _PROGRESS, ignored_in=(_S.INITIALIZE, _S.HANDLING_COMPLETED))

    def periodic_restart_check(self) -> None:
        """A restart is waited for."""
        self._follow("periodic_restart_check", _CHECKED, ignored_in=())

    def handle_ipc_connection_lost(self) -> None:
        """The rank has ended."""
        self._follow("handle_ipc_connection_lost", _LOST, ignored_in=(_S.ABORTED, _S.UNINITIALIZED, _S.FINALIZED))

    def handle_signal(self) -> None:
        """The monitor is asked to end."""
        self._follow("handle_signal", _SIGNAL, ignored_in=(_S.UNINITIALIZED,))

    def can_transition_to(self, new_state: RankMonitorState) -> bool:
        """Whether it may come next."""
        return new_state in _NEXT[self.state]

    def transition_to(self, new_state: RankMonitorState) -> None:
        """Go there.

        Raises:
            InvalidStateTransitionException: it may not come next.
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
