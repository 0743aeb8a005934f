"""The ranks of the running cycle on this node, and the signals that the user has forwarded to them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping

from megatron_ft.core.records import launcher as records
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.ipc.linux.processes import send_signal, would_end_by
from megatron_ft.launcher.base import lines
from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.processes.worker import Worker

__all__ = ["Ranks"]


class Ranks:
    """Of one node. Of the forwarded signals, one of ``save_signals`` is a request to stop where no rank handles it."""

    def __init__(
        self,
        signals: SignalWatch,
        *,
        save_signals: Collection[signal.Signals],
        log: EventLog,
        say: Callable[[str], None],
    ) -> None:
        self._signals = signals
        self._save_signals = save_signals
        self._log = log
        self._say = say
        self._workers: Mapping[int, Worker] = {}

    def follow(self, workers: Mapping[int, Worker]) -> None:
        """The ranks of a new cycle, by local rank; more may be added while they start."""
        self._workers = workers

    def pids(self) -> set[int]:
        """Process ids of those that aren't reaped."""
        return {worker.pid for worker in self._workers.values() if not worker.reaped}

    def forward_signals(self) -> None:
        """Forward the signals that have come since the last call."""
        for number in self._signals.take_to_forward():
            self._forward(number)

    def _forward(self, number: signal.Signals) -> None:
        """To the ranks that have a handler for it; it would only kill the others."""
        alive = [worker for worker in self._workers.values() if not worker.poll_end()]
        unready = [worker for worker in alive if would_end_by(worker.pid, number)]
        passed_on = [worker for worker in alive if worker not in unready]
        for worker in passed_on:
            send_signal(worker.pidfd, number)  # not counted as a signal of ours: it doesn't explain a rank's exit
        if number in self._save_signals and not passed_on:
            self._say(f"{number.name} treated as a request to stop: no rank has a handler for it")
            self._signals.note(signal.SIGTERM, time.monotonic())
            return
        ranks = [worker.local_rank for worker in passed_on]
        without = [worker.local_rank for worker in unready]
        self._say(lines.forwarded(number.name, ranks=ranks, unready=without))
        forwarded = records.SignalForwarded(signal=number.name, local_ranks=tuple(ranks), unready=tuple(without))
        self._log.write(forwarded)
