"""What the launchers of one cycle tell each other, through the store of the rendezvous.

The log is append-only: an entry is written only where none is, so all nodes read the same entries in the same
order. Beside it each node counts up a number of its own, and watches that of the next node in a ring: one that
stands still for too long belongs to a node that is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_ft.core.job_view import Entry, JobView, Judge, NodeReport, node_changed
from megatron_ft.core.restart_policy import NodeState, Outcome
from megatron_ft.launcher.reactor import THREAD_PREFIX

__all__ = ["CUT_OFF_AFTER_S", "LOST_AFTER_S", "JobLog"]

KEEP_ALIVE_INTERVAL_S = 1.0
LOST_AFTER_S = 6.0
"""A node whose number stands still for so long is lost for the others."""
CUT_OFF_AFTER_S = 15.0
"""A node that has no answer from the store for so long is cut off. Longer than the others take to find it lost: a
store that is merely slow must not end every node."""
_POLL_S_PER_NODE = 0.001
"""The store serves all nodes, one after the other: with many of them each asks less often."""


class JobLog:
    """One node's part of it, in a thread of its own. ``fileno`` is readable after each change of ``view``."""

    def __init__(
        self,
        store: Any,
        *,
        prefix: str,
        node: int,
        nodes: int,
        name: str,
        interval_s: float,
        judge: Judge,
        on_decided: Callable[[Outcome], None],
    ) -> None:
        """``on_decided`` is called once, in the thread, before anybody else hears of the outcome."""
        self._store = store
        self._prefix = prefix
        self._node = node
        self._name = name
        self._interval_s = max(interval_s, nodes * _POLL_S_PER_NODE)
        self._judge = judge
        self._on_decided = on_decided
        self._queue: deque[Entry] = deque()
        self._next = 0
        self._own = 0
        self._watched: int | None = None
        self._watched_count = -1
        self._silent_s = 0.0
        self._wake = threading.Event()
        self._stop = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._last_answer_s = time.monotonic()
        self.view = JobView((NodeReport(),) * nodes)
        """Replaced as a whole, never changed."""
        self.error: Exception | None = None
        """The store can't be asked any more: its host is gone."""
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}job_log", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For the reactor."""
        return self._wake_fd

    def drain(self) -> None:
        """Empty the wake-up descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def append(self, entry: Entry) -> None:
        """Have an entry written; doesn't wait for it."""
        self._queue.append(entry)
        self._wake.set()

    def is_written(self) -> bool:
        """Whether everything is written, or can't be any more."""
        return not self._queue or self.error is not None

    def silent_for_s(self) -> float:
        """How long the store hasn't answered."""
        return time.monotonic() - self._last_answer_s

    def stop(self) -> None:
        """End the thread. One that waits for a host that is gone is left behind."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive() and self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _run(self) -> None:
        try:
            self._store.set(self._key("name", self._node), self._name)
            self._work()
        except Exception as error:  # noqa: BLE001 - handed to the launcher's thread, whatever it is
            self.error = error
            os.eventfd_write(self._wake_fd, 1)

    def _work(self) -> None:
        looked_s, next_tick_s = time.monotonic(), 0.0
        while not self._stop:
            while self._queue:
                self._write(self._queue[0])
                self._queue.popleft()
                os.eventfd_write(self._wake_fd, 1)  # somebody may wait for that
            while self._store.check([self._key("log", self._next)]):
                self._took(self._store.get(self._key("log", self._next)))
            now = time.monotonic()
            if now >= next_tick_s:
                # time in which we didn't look (this machine was suspended, say) says nothing about others
                self._keep_alive(min(now - looked_s, 2 * KEEP_ALIVE_INTERVAL_S))
                looked_s, next_tick_s = now, now + KEEP_ALIVE_INTERVAL_S
            self._last_answer_s = time.monotonic()
            if self._wake.wait(self._interval_s):
                self._wake.clear()

    def _write(self, entry: Entry) -> None:
        self._own += 1
        text = json.dumps({**entry, "id": f"{self._node}.{self._own}"}).encode()
        while True:
            there = self._store.compare_set(self._key("log", self._next), "", text.decode())
            self._took(there)
            if there == text:
                return

    def _took(self, text: bytes) -> None:
        self._next += 1
        view = self.view.after(json.loads(text), self._judge)
        if view.outcome is not None and self.view.outcome is None:
            self._on_decided(view.outcome)
        self.view = view
        os.eventfd_write(self._wake_fd, 1)

    def _keep_alive(self, passed_s: float) -> None:
        self._store.add(self._key("alive", self._node), 1)
        watched = self.view.next_alive(self._node)
        if watched is None:
            return
        count = self._store.add(self._key("alive", watched), 0)
        if (watched, count) != (self._watched, self._watched_count):
            self._watched, self._watched_count, self._silent_s = watched, count, 0.0
            return
        self._silent_s += passed_s
        if self._silent_s >= LOST_AFTER_S:
            name_key = self._key("name", watched)
            name = self._store.get(name_key).decode() if self._store.check([name_key]) else "never heard of"
            text = f"its launcher was not heard of for {LOST_AFTER_S:g} s"
            self._write(node_changed(watched, NodeState.LOST, name=name, text=text))

    def _key(self, *words: object) -> str:
        return "/".join(map(str, (self._prefix, *words)))
