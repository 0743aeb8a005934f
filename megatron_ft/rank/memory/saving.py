"""Saves this rank's snapshots, one at a time: decides which, copies what must be copied, and hands it to a thread."""

from __future__ import annotations

import atexit
import os
import queue
import threading

from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.memory.layout import TRAILER_BYTES, Layout, encode
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.core.messages.keeper import Reserve, Reserved
from megatron_ft.ipc.memory.digests import MakeHasher
from megatron_ft.rank.base import say
from megatron_ft.rank.memory.connection import KeeperConnection, Place, RefusedError
from megatron_ft.rank.memory.snapshot import GivenUpError, Snapshot
from megatron_ft.rank.memory.staging import Staging, copied_bytes
from megatron_ft.rank.memory.tensors import Gathered, Optimizers, apart, gather

_RESERVE_S = 60.0
_STOP_S = 2.0
_FIRST_SPEED = 0.5e9
"""Bytes per second that a thread is taken to read until it has been measured."""
_SKIP_WINDOW = 8
"""Number of wanted snapshots within which a second one that is skipped makes this rank save less often."""
_LAYOUT_SLACK = 1 << 16
"""Bytes by which a layout may grow without a new reservation: numbers get longer."""


class Saver:
    """One per process."""

    def __init__(self, place: Place, make_hasher: MakeHasher) -> None:
        self._place = place
        self._make_hasher = make_hasher
        self._connection = KeeperConnection(place)
        self._optimizers = Optimizers(self._before_step)
        self._staging = Staging()
        self._snapshot: Snapshot | None = None
        self._jobs: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._bytes_per_s = _FIRST_SPEED
        self._stride = 1
        """Every which of the wanted snapshots is saved: a power of 2, so that all ranks have some in common."""
        self._wanted = 0
        self._skipped: int | None = None
        """Number of the wanted snapshot that was skipped last."""
        self._reserve = Reserve(0, 0)
        """Last reservation that was granted."""
        self._refused: Reserve | None = None
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._stop)

    def save(self, iteration: int, state: object, every: int) -> None:
        """Begin to save, unless this iteration isn't wanted or an earlier snapshot isn't done.

        Raises:
            SnapshotError: the state can't be kept.
        """
        if iteration % (every * self._stride) or os.getpid() != self._pid:
            return
        self._wanted += 1
        if self._snapshot is not None and not self._snapshot.over.is_set():
            if self._snapshot.granted.is_set():  # a keeper that is being replaced is no reason to save less often
                self._save_less(every)
            return
        if self._snapshot is not None and isinstance(self._snapshot.error, GivenUpError):
            self._save_less(every)
        self._optimizers.watch()
        gathered = gather(state)
        later, now = apart(gathered.sources, self._optimizers.owned())
        if not self._has_room(gathered, copied_bytes(later, now)):
            return
        copied = self._staging.copy_now(now)
        staged, event = self._staging.send(later, now)
        self._snapshot = Snapshot(
            iteration,
            self._place.info,
            gathered,
            later=[each for each in later if not each.tensor.is_cuda],
            copied=[*copied, *staged],
            event=event,
            bytes_later=sum(each.entry.nbytes for each in later),
        )
        self._start_thread()
        self._jobs.put(self._snapshot)

    def wait(self) -> None:
        """Return when no snapshot is on its way any more."""
        while self._snapshot is not None and not self._snapshot.over.wait(0.5):
            if self._thread is None or not self._thread.is_alive():
                return

    def give_up(self) -> None:
        """Give up a snapshot on its way, before the state is replaced by another one."""
        if self._snapshot is not None:
            self._snapshot.give_up()
            self.wait()

    # -- the training thread ----------------------------------------------------------------------------------

    def _before_step(self) -> None:
        snapshot, thread = self._snapshot, self._thread
        if snapshot is not None and thread is not None:
            snapshot.wait_read(thread, self._bytes_per_s)

    def _save_less(self, every: int) -> None:
        """Note a snapshot that took too long; at the second one of late, save less often."""
        is_repeated = self._skipped is not None and self._wanted - self._skipped <= _SKIP_WINDOW
        self._skipped = self._wanted
        if is_repeated:
            self._stride, self._skipped = 2 * self._stride, None
            say.note(
                f"memory checkpoints take longer than the {every * self._stride // 2} iterations between two; "
                f"rank 0 saves every {every * self._stride} iterations from now on"
            )

    def _has_room(self, gathered: Gathered, copies_bytes: int) -> bool:
        """Return True if the keeper has reserved memory for this state; it is asked when the state is larger."""
        had = self._reserve
        if (
            gathered.data_bytes + TRAILER_BYTES <= had.segment_bytes - _LAYOUT_SLACK
            and copies_bytes <= had.copies_bytes
        ):
            return True
        entries = tuple(each.entry for each in gathered.sources)
        key = SnapshotKey(self._place.info.cycle, 0)
        info = self._place.info
        layout = encode(Layout(key, info.global_rank, info.world_size, entries, gathered.values))
        wanted = Reserve(gathered.data_bytes + len(layout) + TRAILER_BYTES + 2 * _LAYOUT_SLACK, copies_bytes)
        if wanted == self._refused:
            return False
        try:
            self._connection.open()
            self._connection.ask(wanted, Reserved, _RESERVE_S)
        except RefusedError:
            self._refused = wanted  # the launcher has printed why
            return False
        except SnapshotError as error:
            say.warn(f"no memory checkpoint is saved: {error}")
            return False
        self._reserve = wanted
        return True

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="ft_memory", daemon=True)
            self._thread.start()

    def _forget(self) -> None:
        """In a child of this process: the connection, the thread and the snapshot are the parent's."""
        self._connection.close()
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = self._thread = None

    def _stop(self) -> None:
        """At the end of the script: a snapshot on its way is given up, which takes as long as a block."""
        if self._snapshot is not None and self._thread is not None and self._thread.is_alive():
            self._snapshot.stop(_STOP_S)

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            snapshot = self._jobs.get()
            try:
                self._write(snapshot)
            except GivenUpError as error:
                snapshot.error = error
            except SnapshotError as error:
                snapshot.error = error
                say.warn(f"memory checkpoint of iteration {snapshot.iteration} is given up: {error}")
            finally:
                snapshot.end()  # whatever was raised
            del snapshot

    def _write(self, snapshot: Snapshot) -> None:
        if not self._connection.is_open:
            self._connection.open()  # the keeper is another one, and knows nothing of this rank
            self._connection.ask(self._reserve, Reserved, _RESERVE_S)
        snapshot.write(self._connection, self._make_hasher)
        if snapshot.read_s and snapshot.bytes_later > 1 << 20:
            self._bytes_per_s = snapshot.bytes_later / snapshot.read_s


_saver: Saver | None = None


def saver(place: Place, make_hasher: MakeHasher) -> Saver:
    """Return the saver of this process."""
    global _saver
    if _saver is None:
        _saver = Saver(place, make_hasher)
    return _saver


def running() -> Saver | None:
    """Return the saver of this process if it has saved before."""
    return _saver
