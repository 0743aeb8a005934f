"""What the launcher of one node holds for the whole job, opened at its start and given back at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.elastic.multiprocessing import SignalException

from megatron_ft.core.errors import FaultToleranceError
from megatron_ft.core.restart_policy import AnyFailed, RestartPolicy
from megatron_ft.ipc.event_log import EventLog
from megatron_ft.ipc.prctl import become_subreaper
from megatron_ft.launcher import descendants, directories, lines
from megatron_ft.launcher.arguments import CommandLine
from megatron_ft.launcher.control import ControlSocket
from megatron_ft.launcher.ending import Ending
from megatron_ft.launcher.monitors import Monitors
from megatron_ft.launcher.reactor import Priority, Reactor
from megatron_ft.launcher.signals import SignalWatch
from megatron_ft.launcher.workers import FreshInterpreterSpawner, Spawner, Worker

__all__ = ["Node", "say"]

T = TypeVar("T")


def say(text: str) -> None:
    """Print one line for the user."""
    try:
        print(f"{lines.PREFIX}{text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # a terminal that is gone must not end the job; the event log has it


class Node:
    """The services of this node's launcher."""

    def __init__(self, line: CommandLine, *, ranks: int, log: EventLog, log_dir: str) -> None:
        """Take the signals and make the run directory; ``start`` does the rest.

        Raises:
            ConfigError: there is no place for the run directory.
        """
        self.log = log
        self.line = line
        self.say = say
        self.policy: RestartPolicy = AnyFailed(line.namespace.max_restarts)
        self.spawner: Spawner = FreshInterpreterSpawner()
        self.workers: dict[int, Worker] = {}
        """Those of the cycle that runs, by local rank."""
        self.ranks_ended_well = False
        """All ranks of the last cycle ended with 0."""
        self._told_stop = False
        become_subreaper()
        self.reactor = Reactor()
        self.signals = SignalWatch(line.signals, keep_ignored_hangup=line.signals_are_default)
        self.signals.install()
        self.reactor.watch(self.signals.fileno(), self._woken, Priority.SIGNAL)
        self.run_dir = directories.make_run_directory()
        self.ending = Ending(
            self.reactor, known_children=self._known_children, in_a_hurry=self.signals.ask_to_kill, say=say
        )
        self.control = ControlSocket(os.path.join(self.run_dir, "launcher.sock"), self.reactor, say=say)
        self.monitors = Monitors(
            count=ranks,
            config=line.options.config.to_dict(),
            run_dir=self.run_dir,
            log_dir=log_dir,
            run_id=line.run_id,
            reactor=self.reactor,
            log=log,
            say=say,
        )

    def start(self) -> None:
        """Listen and start the monitors.

        Raises:
            FaultToleranceError: that can't be done.
        """
        try:
            self.control.start()
            self.monitors.start()
        except OSError as error:
            raise FaultToleranceError(f"the rank monitors can't be started: {error}") from error

    def environment(self, local_rank: int, cycle: int) -> dict[str, str]:
        """What a rank finds in its environment beyond torchrun's."""
        return {
            "FT_RANK_MONITOR_IPC_SOCKET": self.monitors.socket_path(local_rank),
            "FT_LAUNCHER_IPC_SOCKET": self.control.path,
            "FT_CYCLE": str(cycle),
        }

    def blocking(self, function: Callable[[], T]) -> T:
        """Run what may wait for other nodes, without keeping anything else waiting.

        Raises:
            SignalException: the launcher was asked to stop meanwhile.
        """
        return self.reactor.call_blocking(function, self.raise_if_asked_to_stop)

    def raise_if_asked_to_stop(self) -> None:
        """Leave what is going on if the launcher was asked to stop.

        Raises:
            SignalException: it was.
        """
        if self.signals.received:
            number = self.signals.received[0]
            self.tell_asked_to_stop(ranks=0)
            raise SignalException(f"asked to stop by {number.name}", sigval=number)

    def tell_asked_to_stop(self, *, ranks: int) -> None:
        """Say once that the launcher was asked to stop, and how many ranks that goes to."""
        if not self._told_stop:
            self._told_stop = True
            name = self.signals.received[0].name
            self.say(lines.asked_to_stop(name=name, ranks=ranks, timeout_s=self.line.term_timeout))
            self.log.write("stop_requested", signal=name, ranks=ranks)

    def close(self) -> None:
        """End the monitors and remove what was made."""
        self.monitors.stop()
        self.control.close()
        directories.remove_run_directory(self.run_dir)
        descendants.reap_orphans(lambda _pid: False)
        self.signals.close()
        self.reactor.close()

    def _woken(self) -> None:
        self.signals.drain()
        self.monitors.check_states()
        known = self._known_children()
        descendants.reap_orphans(lambda pid: pid in known)

    def _known_children(self) -> set[int]:
        ranks = {worker.pid for worker in self.workers.values() if not worker.reaped}
        return ranks | self.monitors.pids()
