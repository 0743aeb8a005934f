"""Wait between two cycles until the driver has taken back the device memory of the last ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from megatron_ft.core.device_memory import (
    LONGEST_WAIT_S,
    Holding,
    describe,
    held_by,
    look_again_s,
)
from megatron_ft.core.facts import launcher as records
from megatron_ft.ipc.linux import nvml
from megatron_ft.link.reactor import THREAD_PREFIX, Reactor
from megatron_ft.records.event_log import EventLog

TELL_AFTER_S = 1.0
DRIVER_S = 5.0
"""Additional seconds for the driver's answer; a slower driver isn't asked again."""
_OLD_S = 1.0
"""Age of a query beyond which it is outdated: the node may have been on standby for hours."""

Query = Callable[[], list[Holding] | None]


class DeviceMemoryWait:
    """Queries while the nodes meet, so that usually no start waits. Does nothing without an NVIDIA driver."""

    def __init__(
        self,
        reactor: Reactor,
        *,
        log: EventLog,
        say: Callable[[str], None],
        load: Callable[[], Any | None] = nvml.load,
        query: Callable[[Any], list[Holding] | None] = nvml.holdings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``load`` and ``query``: the driver's library and the query to it; ``clock``: seconds."""
        self._reactor = reactor
        self._log = log
        self._say = say
        self._load = load
        self._query = query
        self._clock = clock
        self._waiting: _MemoryWait | None = None
        self._gave_up = False

    def begin(self, ended: Collection[int]) -> None:
        """Query, in a thread, until no device memory of these ended processes is held."""
        library = None if self._gave_up or not ended else self._load()
        self._waiting = None
        if library is not None:
            self._waiting = _MemoryWait(frozenset(ended), lambda: self._query(library), self._clock)

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until the memory is free, or given up; serves everything else meanwhile.

        Raises:
            any exception of ``check``, which is called after each event.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        waiting.renew()
        if waiting.thread.is_alive():

            def say_waiting() -> None:
                if waiting.held and waiting.left_s():
                    text = f"waiting for device memory of the last cycle, at most {LONGEST_WAIT_S:g} s"
                    self._say(f"{text}: {describe(waiting.held)}")

            tell = self._reactor.call_later(TELL_AFTER_S, say_waiting)
            try:
                self._reactor.call_blocking(lambda: waiting.thread.join(waiting.left_s() + DRIVER_S), check)
            finally:
                tell.cancel()
        if waiting.thread.is_alive():
            self._gave_up = True
            self._say("the NVIDIA driver is not responding: no longer waiting for the device memory of exited ranks")
        elif waiting.saw_any:
            if waiting.held:
                waited = f"after {waiting.waited_s:.1f} s device memory of the last cycle is still held"
                self._say(f"{waited}: {describe(waiting.held)}; starting the ranks without waiting any longer")
            self._log.write(records.DeviceMemory(waited_s=round(waiting.waited_s, 3), held=tuple(waiting.held)))


class _MemoryWait:
    """One wait, in a thread of its own: the driver may be slow."""

    def __init__(self, ended: frozenset[int], query: Query, clock: Callable[[], float]) -> None:
        self._ended = ended
        self._query = query
        self._clock = clock
        self._began_s = self._looked_s = clock()
        self.held: list[Holding] = []
        self.saw_any = False
        self.waited_s = 0.0
        """Seconds from the beginning to the last query."""
        self.thread = self._start()

    def renew(self) -> None:
        """Query again, if the wait was given up a while ago."""
        if self.held and not self.thread.is_alive() and self._clock() - self._looked_s > _OLD_S:
            self.thread = self._start()

    def left_s(self) -> float:
        """Return the seconds until the wait is given up."""
        return max(0.0, self._began_s + LONGEST_WAIT_S - self._clock())

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}device_memory", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while True:
            self.held = held_by(self._query() or [], self._ended)
            self._looked_s = self._clock()
            self.waited_s = self._looked_s - self._began_s
            self.saw_any = self.saw_any or bool(self.held)
            pause_s = look_again_s(self.held, self.waited_s)
            if pause_s is None:
                return
            time.sleep(pause_s)
