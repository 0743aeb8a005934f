"""How a launcher learns at once that another one has written something, without asking all the time.

Every launcher waits, on a connection of its own, for the next key of a chain in the store of the rendezvous. Who has
written something sets that key: the store wakes all who wait for it. One chain serves a whole job, so that nobody is
left waiting for a cycle that is over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_ft.launcher.reactor import THREAD_PREFIX

__all__ = ["Doorbell"]

_PREFIX = "megatron_ft/bell"
_FOR_EVER = timedelta(days=20)
"""torch prints a warning for each wait that is over, and counts its milliseconds in 31 bits."""


class Doorbell:
    """One launcher's ear. ``on_ring`` is called in a thread of its own, and never late only where ``is_heard``."""

    def __init__(self, store: Any, *, run_id: str) -> None:
        """``store`` is the one that all rounds share; one that can't be waited for cheaply is never heard."""
        self._prefix = f"{_PREFIX}/{run_id}"
        self._next = 0
        self.on_ring: Callable[[], None] = lambda: None
        self.is_heard = False
        if isinstance(store, TCPStore) and hasattr(store, "clone"):
            self._next = int(store.add(f"{self._prefix}/count", 0)) + 1
            self.is_heard = True
            # it waits inside torch for as long as the launcher lives
            threading.Thread(target=self._listen, args=(store,), name=f"{THREAD_PREFIX}doorbell", daemon=True).start()

    def ring(self, store: Any) -> None:
        """Wake all launchers; through a store that all rounds share, but on the caller's own connection."""
        if not self.is_heard:
            return
        number, ours = self._next, f"{os.getpid()}.{threading.get_ident()}.{os.urandom(4).hex()}".encode()
        while store.compare_set(f"{self._prefix}/{number}", "", ours.decode()) != ours:
            number += 1
        # where those begin that come later; a smaller number than another's would only wake them once too often
        store.set(f"{self._prefix}/count", str(number))

    def _listen(self, store: Any) -> None:
        try:
            connection = store.clone()
            while True:
                connection.wait([f"{self._prefix}/{self._next}"], _FOR_EVER)
                self._next += 1
                self.on_ring()
        except Exception:  # noqa: BLE001 - whatever torch raises when the store's host is gone
            self.is_heard = False
            self.on_ring()  # who asks the store now learns why
