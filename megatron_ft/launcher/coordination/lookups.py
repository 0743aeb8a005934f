"""Looking up names of hosts without waiting for name servers."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable

from megatron_ft.ipc.net import tcp
from megatron_ft.launcher.base.event_loop import THREAD_PREFIX, Reactor

__all__ = ["Lookups"]


class Lookups:
    """Each is looked up in a thread of its own: a name server may be silent for minutes. One at a time for a name."""

    def __init__(self, reactor: Reactor, done: Callable[[str, list[tcp.Target]], None]) -> None:
        self._reactor = reactor
        self._done = done
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._found: queue.SimpleQueue[tuple[str, list[tcp.Target]]] = queue.SimpleQueue()
        self._running: set[str] = set()
        self._lock = threading.Lock()
        """A thread that holds it may write to the descriptor, unless it is closed."""
        self._is_closed = False
        reactor.watch(self._fd, self._take)

    def start(self, address: str, host: str, port: int) -> None:
        """``done`` is called with the address and what was found, perhaps nothing."""
        if address in self._running:
            return
        self._running.add(address)
        work = functools.partial(self._look_up, address, host, port)
        # a daemon: one that waits for a name server must not keep the launcher alive
        threading.Thread(target=work, name=f"{THREAD_PREFIX}look_up", daemon=True).start()

    def close(self) -> None:
        """Hear of none any more; calling it again does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._reactor.unwatch(self._fd)
                os.close(self._fd)

    def _look_up(self, address: str, host: str, port: int) -> None:
        try:
            targets = tcp.look_up(host, port)
        except OSError:
            targets = []
        self._found.put((address, targets))
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._fd, 1)

    def _take(self) -> None:
        os.eventfd_read(self._fd)
        while not self._found.empty():
            address, targets = self._found.get()
            self._running.discard(address)
            self._done(address, targets)
