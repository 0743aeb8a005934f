"""What the launchers of one cycle tell each other, through the store of the rendezvous.

The log is append-only: an entry is written only where none is, so all nodes read the same entries in the same
order. Beside it each node counts up a number of its own, and watches those of the next nodes in a ring: one that
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
from megatron_ft.core.restart_policy import NodeState
from megatron_ft.launcher.doorbell import Doorbell
from megatron_ft.launcher.reactor import THREAD_PREFIX

__all__ = ["CUT_OFF_AFTER_S", "CUT_OFF_ALONE_AFTER_S", "LOST_AFTER_S", "JobLog"]

KEEP_ALIVE_INTERVAL_S = 1.0
LOST_AFTER_S = 6.0
"""A node whose number stands still for so long is lost for the others."""
CUT_OFF_AFTER_S = 15.0
"""A node that has no answer from the store for so long is cut off. Longer than the others take to find it lost: a
store that is merely slow must not end every node."""
CUT_OFF_ALONE_AFTER_S = 60.0
"""The same where the ranks go on together with the others' as long as they can: torch's time for an answer."""
LOST_AFTER_WHEN_OVER_S = 2.0
"""The same when the cycle is over, and the next one waits for that node."""
_INTERVAL_WHEN_OVER_S = 0.5
_S_PER_NODE = 0.001
"""The store serves all nodes, one after the other: with many of them each asks less often."""
_GATHER_AGAIN_S = 0.03
_WATCHED = 3
"""So many nodes each one watches: several may be lost together, as those of one rack."""


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
        on_decided: Callable[[JobView], None],
        bell: Doorbell,
    ) -> None:
        """``on_decided`` is called once, in the thread, before anybody else hears of the outcome.

        ``bell`` tells of new entries; where it can't be heard they are looked for every ``interval_s`` seconds.
        """
        self._store = store
        self._bell = bell
        self._prefix = prefix
        self._node = node
        self._name = name
        self._poll_s = max(interval_s, nodes * _S_PER_NODE)
        self._slower_s = nodes * _S_PER_NODE
        self._judge = judge
        self._on_decided = on_decided
        self._queue: deque[Entry] = deque()
        self._next = 0
        self._own = 0
        self._watched: dict[int, tuple[int, float]] = {}
        self._wake = threading.Event()
        self._note: str | None = None
        self._gathers = self._gathered = False
        self.notes: dict[int, str] = {}
        self._stop = False
        self._is_over = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._last_answer_s = time.monotonic()
        self.view = JobView((NodeReport(),) * nodes)
        """Replaced as a whole, never changed."""
        self.error: Exception | None = None
        """The store can't be asked any more: its host is gone."""
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}job_log", daemon=True)
        bell.on_ring = self._wake.set
        self._thread.start()

    def fileno(self) -> int:
        """For the reactor."""
        return self._wake_fd

    def drain(self) -> None:
        """Empty the wake-up descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def publish(self, note: str) -> None:
        """Lay something down for the node that asks for it; doesn't wait for it."""
        self._note = note
        self._wake.set()

    def gather(self) -> None:
        """Ask for what the other nodes lay down: it appears in ``notes``, by node, as it comes."""
        if not self._gathers and not self._gathered:
            self._gathers = True
            self._wake.set()

    def stop_gathering(self) -> None:
        """Ask no more."""
        self._gathers = False
        self._gathered = True

    def append(self, entry: Entry) -> None:
        """Have an entry written; doesn't wait for it."""
        self._queue.append(entry)
        self._wake.set()

    def cycle_is_over(self) -> None:
        """Nobody trains any more: a node that is silent is waited for, so it is found lost sooner."""
        self._is_over = True
        self._wake.set()

    def is_written(self) -> bool:
        """Whether everything is written, or can't be any more."""
        return not self._queue or self.error is not None

    @property
    def last_answer_s(self) -> float:
        """When the store answered last, by ``time.monotonic``."""
        return self._last_answer_s

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
            if self._bell.is_heard:
                # a connection serves one call at a time, and the agent's waits for other nodes on its own
                self._store = self._store.clone()
            self._store.set(self._key("name", self._node), self._name)
            self._work()
        except Exception as error:  # noqa: BLE001 - handed to the launcher's thread, whatever it is
            self.error = error
            os.eventfd_write(self._wake_fd, 1)

    def _work(self) -> None:
        looked_s, next_tick_s = time.monotonic(), 0.0
        while not self._stop:
            wrote = False
            while self._queue:
                wrote |= self._write(self._queue[0])
                self._queue.popleft()
                os.eventfd_write(self._wake_fd, 1)  # somebody may wait for that
            if wrote:
                self._bell.ring(self._shared_store())
            self._exchange_notes()
            while self._store.check([self._key("log", self._next)]):
                self._took(self._store.get(self._key("log", self._next)))
            now, interval_s = time.monotonic(), self._interval_s()
            if now >= min(next_tick_s, looked_s + interval_s):
                # time in which we didn't look (this machine was suspended, say) says nothing about others
                self._keep_alive(min(now - looked_s, 2 * interval_s))
                looked_s, next_tick_s = now, now + self._interval_s()
            self._last_answer_s = time.monotonic()
            wait_s = max(0.0, min(next_tick_s, looked_s + self._interval_s()) - self._last_answer_s)
            wait_s = min(wait_s, _GATHER_AGAIN_S) if self._gathers else wait_s
            if self._wake.wait(wait_s if self._bell.is_heard else min(wait_s, self._poll_s)):
                self._wake.clear()

    def _exchange_notes(self) -> None:
        if self._note is not None:
            note, self._note = self._note, None
            self._store.set(self._key("note", self._node), note)
        if not self._gathers:
            return
        missing = [n for n in range(len(self.view.nodes)) if n not in self.notes and n != self._node]
        for node in missing:
            if self._store.check([self._key("note", node)]):
                self.notes[node] = self._store.get(self._key("note", node)).decode()
        if len(self.notes) >= len(self.view.nodes) - 1:
            self.stop_gathering()
        os.eventfd_write(self._wake_fd, 1)

    def _interval_s(self) -> float:
        """Between two signs of life."""
        if self._is_over or self.view.outcome is not None:
            return max(_INTERVAL_WHEN_OVER_S, self._slower_s)
        return max(KEEP_ALIVE_INTERVAL_S, self._slower_s)

    def _lost_after_s(self) -> float:
        if self._is_over or self.view.outcome is not None:
            return LOST_AFTER_WHEN_OVER_S + 2 * self._slower_s
        return LOST_AFTER_S + 2 * self._slower_s

    def _shared_store(self) -> Any:
        return getattr(self._store, "underlying_store", self._store)

    def _write(self, entry: Entry) -> bool:
        """Whether it was written: it isn't if those before it make it needless."""
        self._own += 1
        text = json.dumps({**entry, "id": f"{self._node}.{self._own}"}).encode()
        while not self.view.makes_needless(entry):
            there = self._store.compare_set(self._key("log", self._next), "", text.decode())
            self._took(there)
            if there == text:
                return True
        return False

    def _took(self, text: bytes) -> None:
        self._next += 1
        view = self.view.after(json.loads(text), self._judge)
        if view.outcome is not None and self.view.outcome is None:
            self._on_decided(view)
        self.view = view
        os.eventfd_write(self._wake_fd, 1)

    def _keep_alive(self, passed_s: float) -> None:
        self._store.add(self._key("alive", self._node), 1)
        before, self._watched = self._watched, {}
        lost_after_s = self._lost_after_s()
        for node in self.view.next_alive(self._node, _WATCHED):
            count = self._store.add(self._key("alive", node), 0)
            last_count, silent_s = before.get(node, (-1, 0.0))
            silent_s = silent_s + passed_s if count == last_count else 0.0
            self._watched[node] = count, silent_s
            if silent_s >= lost_after_s and node not in self.view.gone:
                self._found_lost(node, silent_s=lost_after_s)

    def _found_lost(self, node: int, *, silent_s: float) -> None:
        name_key = self._key("name", node)
        name = self._store.get(name_key).decode() if self._store.check([name_key]) else "never heard of"
        text = f"its launcher was not heard of for {silent_s:.0f} s"
        self._write(node_changed(node, NodeState.LOST, name=name, text=text))
        self._bell.ring(self._shared_store())

    def _key(self, *words: object) -> str:
        return "/".join(map(str, (self._prefix, *words)))
