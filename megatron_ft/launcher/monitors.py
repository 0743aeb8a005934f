"""The rank monitors of this node: one per local rank, for the whole job, replaced when they die or stand still."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ft.core.board_layout import BoardSnapshot
from megatron_ft.ipc.event_log import EventLog
from megatron_ft.ipc.wire import Message
from megatron_ft.launcher.monitor_place import MonitorPlace
from megatron_ft.launcher.reactor import Reactor

__all__ = ["Monitors"]

_CHECK_S = 1.0
_STOP_WAIT_S = 2.0


class Monitors:
    """All monitors of this node. ``on_message`` gets what they say of their ranks: (local rank, message)."""

    def __init__(
        self,
        *,
        count: int,
        config: Mapping[str, Any],
        run_dir: str,
        log_dir: str,
        run_id: str,
        reactor: Reactor,
        log: EventLog,
        say: Callable[[str], None],
    ) -> None:
        self.on_message: Callable[[int, Message], None] = lambda _local_rank, _message: None
        self._reactor = reactor
        self._places = [
            MonitorPlace(
                local_rank,
                socket_path=os.path.join(run_dir, f"monitor-{local_rank}.sock"),
                spawn_options={"config": config, "log_dir": log_dir, "run_id": run_id},
                reactor=reactor,
                log=log,
                say=say,
                on_message=self._hear,
            )
            for local_rank in range(count)
        ]
        self._timer = reactor.call_later(_CHECK_S, self._check_looks)

    def start(self) -> None:
        """Listen and start them all. Ranks can connect from now on, whether their monitor is up yet or not.

        Raises:
            OSError: a socket can't be made or a process can't be started.
        """
        for place in self._places:
            place.start()

    def socket_path(self, local_rank: int) -> str:
        """Where the rank finds its monitor."""
        return self._places[local_rank].socket_path

    def pids(self) -> set[int]:
        """Process ids of those that run."""
        return {place.pid for place in self._places if place.pid is not None}

    def snapshot(self, local_rank: int, cycle: int) -> BoardSnapshot | None:
        """The rank's board in this cycle; None if it has none or it is damaged."""
        return self._places[local_rank].snapshot(cycle)

    def check_states(self) -> None:
        """Replace those that were stopped by a signal. Called after each SIGCHLD."""
        for place in self._places:
            place.replace_if_stopped()

    def hear_all(self) -> None:
        """Read what is there from all of them now."""
        for place in self._places:
            place.read()

    def stop(self) -> None:
        """End all of them and give everything back."""
        self._timer.cancel()
        for place in self._places:
            place.ask_to_stop()
        deadline = time.monotonic() + _STOP_WAIT_S
        for place in self._places:
            place.end(deadline)

    def _hear(self, local_rank: int, message: Message) -> None:
        self.on_message(local_rank, message)

    def _check_looks(self) -> None:
        for place in self._places:
            place.replace_if_overdue()
        self._timer = self._reactor.call_later(_CHECK_S, self._check_looks)
