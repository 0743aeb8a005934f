"""Meeting the other nodes: the number of the cycle, the same on all of them, and nodes that wait to join."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Collection
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megatron_ft.core.advance import Advance
from megatron_ft.core.membership import Admission, Waiting
from megatron_ft.launcher import torch_rendezvous
from megatron_ft.launcher.reactor import THREAD_PREFIX, Reactor

__all__ = [
    "LOOK_ASIDE_S",
    "MembershipWatch",
    "Newcomers",
    "add_restart",
    "agree_on_cycle",
    "cycles_begun",
    "heard_of_end",
    "nodes_aside",
    "note_aside",
    "note_heard",
    "of_the_run",
    "read_advance",
    "restarts_used",
    "write_advance",
]

_KEY = "megatron_ft/cycle"
_RESTARTS_KEY = "megatron_ft/restarts"
_ADVANCE_KEY = "megatron_ft/advance"
_ASIDE_KEY = "megatron_ft/aside"
_HEARD_KEY = "megatron_ft/heard"

LOOK_ASIDE_S = 1.0
"""So often a node that stands aside looks whether the job still lives."""


def agree_on_cycle(store: Any, *, has_rounds: bool, run_id: str, group_rank: int, own_count: int) -> int:
    """The number of the cycle that this round of the rendezvous begins.

    Each round has a store of its own, in front of one that all rounds share: there the first node counts. Where
    a rendezvous has no rounds (``torch_rendezvous.has_rounds``), it is ``own_count``, how many cycles this launcher
    has begun before. Torch's restart count is no such number: it differs between nodes.
    """
    if not has_rounds or not isinstance(store, PrefixStore):
        return own_count
    if group_rank == 0:
        cycle = int(store.underlying_store.add(f"{_KEY}/{run_id}", 1)) - 1
        store.set(_KEY, str(cycle))
        return cycle
    return int(store.get(_KEY))


def cycles_begun(handler: Any) -> int | None:
    """How many cycles the job has begun, all nodes taken together; None where the rendezvous can't be asked."""
    return _add(handler, _KEY, 0)


def note_aside(handler: Any, change: int) -> None:
    """So many more nodes (fewer, if negative) stand aside, and ask from time to time whether the job still lives."""
    _add(handler, _ASIDE_KEY, change)


def nodes_aside(handler: Any) -> int:
    """So many nodes stand aside, as far as is known: one that was killed there counts, too."""
    return _add(handler, _ASIDE_KEY, 0) or 0


def note_heard(handler: Any) -> None:
    """A node that stood by or aside has heard that the job has ended, and needs the store no more."""
    _add(handler, _HEARD_KEY, 1)


def heard_of_end(handler: Any) -> int:
    """So many nodes have."""
    return _add(handler, _HEARD_KEY, 0) or 0


def _add(handler: Any, key: str, change: int) -> int | None:
    store = torch_rendezvous.shared_store(handler)
    try:
        return None if store is None else int(store.add(f"{key}/{handler.get_run_id()}", change))
    except RuntimeError:
        return None  # its host is gone, which the next round says better


def restarts_used(store: Any, *, run_id: str) -> int:
    """How many restarts the whole job has used, for policies that count them so."""
    return int(of_the_run(store).add(f"{_RESTARTS_KEY}/{run_id}", 0))


def add_restart(store: Any, *, run_id: str, before: int) -> None:
    """One more than ``before``. Every node of the cycle writes it, the same number: no loss of a node loses it."""
    of_the_run(store).set(f"{_RESTARTS_KEY}/{run_id}", str(before + 1))


def read_advance(store: Any, *, run_id: str) -> Advance:
    """How far the job has got in all cycles so far."""
    shared, key = of_the_run(store), f"{_ADVANCE_KEY}/{run_id}"
    return Advance(**json.loads(shared.get(key))) if shared.check([key]) else Advance()


def write_advance(store: Any, *, run_id: str, advance: Advance) -> None:
    """Every node of the cycle writes it, the same: as with ``add_restart``."""
    of_the_run(store).set(f"{_ADVANCE_KEY}/{run_id}", json.dumps(dataclasses.asdict(advance)))


def of_the_run(store: Any) -> Any:
    """The store behind those of the rounds, the same for the whole job."""
    return store.underlying_store if isinstance(store, PrefixStore) else store


class Newcomers:
    """The nodes that wait to join, watched for during each cycle."""

    def __init__(self, reactor: Reactor, admission: Admission, on_standby: Callable[[list[Any]], None]) -> None:
        """``on_standby`` is called with nodes that stand by, once for each."""
        self._reactor = reactor
        self._admission = admission
        self._on_standby = on_standby
        self._told: frozenset[Any] = frozenset()
        self._watch: MembershipWatch | None = None
        self._last: MembershipWatch | None = None

    def begin(self, handler: Any, interval_s: float, met: Collection[Any]) -> None:
        """A cycle has begun, with the nodes ``met``."""
        watch = self._watch = MembershipWatch(handler, interval_s, met)

        def changed() -> None:
            watch.drain()
            self._tell(watch.waiting)

        self._reactor.watch(watch.fileno(), changed)

    def end(self) -> None:
        """A cycle is over; calling it again does nothing."""
        if self._watch is not None:
            self._reactor.unwatch(self._watch.fileno())
            self._watch.stop()
            # a question that is under way, to a host that is gone, may take a minute: the next round waits for it
            self._last, self._watch = self._watch, None

    def join(self) -> None:
        """Wait for a question that is under way: the rendezvous serves one caller at a time."""
        if self._last is not None:
            self._last.join()

    def waiting(self) -> int:
        """So many nodes wait that the cycle is to be ended for.

        Raises:
            Exception: whatever the rendezvous raised, which can't be asked any more.
        """
        if self._watch is None:
            return 0
        if self._watch.error is not None:
            raise self._watch.error
        return self._admission.wanted(self._watch.waiting)

    def waiting_at_end(self) -> int:
        """So many waited when the last cycle ended."""
        return 0 if self._last is None else self._admission.wanted(self._last.waiting)

    def _tell(self, waiting: Waiting) -> None:
        fresh = self._admission.standing_by(waiting) - self._told
        self._told |= fresh
        if fresh:
            self._on_standby(sorted(fresh, key=str))


class MembershipWatch:
    """Asks the rendezvous, in a thread of its own, who waits to join. ``fileno`` is readable when that changes."""

    def __init__(self, handler: Any, interval_s: float, met: Collection[Any]) -> None:
        self._handler = handler
        self._interval_s = interval_s
        self._met = met
        self._stop = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.waiting = Waiting()
        """Replaced as a whole."""
        self.error: Exception | None = None
        """The rendezvous can't be asked any more: its host is gone."""
        self._thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}membership", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For the reactor."""
        return self._wake_fd

    def drain(self) -> None:
        """Empty the wake-up descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def stop(self) -> None:
        """Ask no more; doesn't wait for a question that is under way."""
        self._stop.set()

    def join(self) -> None:
        """Wait for a question that is under way: the rendezvous serves one caller at a time."""
        self._thread.join()
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s) and self.error is None:
            before = self.waiting
            try:
                self.waiting = torch_rendezvous.nodes_waiting(self._handler, self._met)
            except Exception as error:  # noqa: BLE001 - handed to the launcher's thread, whatever it is
                self.error = error
            if self.waiting != before or self.error is not None:
                os.eventfd_write(self._wake_fd, 1)
