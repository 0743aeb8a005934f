"""A helper process of the launcher that was stopped (SIGSTOP) does no work any more: it is replaced."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.processes.process_tree import is_stopped

__all__ = ["replace_if_stopped"]

_STOPPED_FOR_S = 0.1


def replace_if_stopped(reactor: Reactor, pid: Callable[[], int | None], replace: Callable[[], None]) -> None:
    """Check now and a moment later: when a whole node is continued, the launcher may be first.

    Args:
        pid: the helper's process id; None if it has ended.
        replace: called if it is stopped at both times.
    """

    def stopped() -> bool:
        number = pid()
        return number is not None and is_stopped(number)

    if stopped():
        reactor.call_later(_STOPPED_FOR_S, lambda: replace() if stopped() else None)
