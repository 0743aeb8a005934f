"""A request to stop the launcher: it is reported once, and breaks off what waits for other nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.elastic.multiprocessing import SignalException

from megatron_ft.core.agent.lines import asked_to_stop
from megatron_ft.core.records import launcher as records
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.base.signals import SignalWatch

__all__ = ["StopRequests"]

T = TypeVar("T")


class StopRequests:
    """Of one launcher. ``timeout_s``: how long its ranks may take to end after a request, as the line says."""

    def __init__(
        self, signals: SignalWatch, reactor: Reactor, *, log: EventLog, say: Callable[[str], None], timeout_s: float
    ) -> None:
        self._signals = signals
        self._reactor = reactor
        self._log = log
        self._say = say
        self._timeout_s = timeout_s
        self._is_reported = False

    def blocking(self, function: Callable[[], T]) -> T:
        """Run a function that may wait for other nodes, while the event loop goes on.

        Raises:
            SignalException: the launcher was asked to stop meanwhile.
        """
        return self._reactor.call_blocking(function, self.check)

    def check(self) -> None:
        """Break off what is going on if the launcher was asked to stop.

        Raises:
            SignalException: it was.
        """
        if self._signals.received:
            number = self._signals.received[0]
            self.report(ranks=0)
            raise SignalException(f"received {number.name}", sigval=number)

    def report(self, *, ranks: int) -> None:
        """Say once that the launcher was asked to stop, and to how many ranks that is forwarded."""
        if not self._is_reported:
            self._is_reported = True
            name = self._signals.received[0].name
            self._say(asked_to_stop(name=name, ranks=ranks, timeout_s=self._timeout_s))
            self._log.write(records.StopRequested(signal=name, ranks=ranks))
