"""Saves this rank's snapshots, one at a time: decides which, copies what must be copied, and hands it to a thread."""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
from typing import Literal

from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.memory.retention import Reserve, Reserved
from megatron_ft.core.memory.segment_layout import TRAILER_BYTES, Layout, encode
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.ipc.log import NOTICE, RANK
from megatron_ft.ipc.memory.digests import MakeHasher
from megatron_ft.rank.base import say
from megatron_ft.rank.memory.keeper_connection import KeeperConnection, Place, RefusedError
from megatron_ft.rank.memory.snapshot import GivenUpError, Snapshot
from megatron_ft.rank.memory.staging import Staging, copied_bytes
from megatron_ft.rank.memory.tensors import Gathered, Optimizers, apart, gather

_RESERVE_S = 60.0
_ASK_S = 2.0
"""Seconds that `save` waits for a reservation, which comes at once; its thread goes on waiting."""
_QUIET_S = 300.0
"""Seconds for which a keeper that doesn't answer isn't asked again."""
_GRANT_S = 10.0
"""Seconds that `wait` waits for a segment."""
_STOP_S = 2.0
_FIRST_SPEED = 0.5e9
"""Bytes per second that a thread is taken to read until it has been measured."""
_SKIP_WINDOW = 8
"""Number of wanted snapshots within which a second one that is skipped makes this rank save less often."""
_LAYOUT_SLACK = 1 << 16
"""Bytes by which a layout may grow without a new reservation: numbers get longer."""
_NOTHING = Reserve(0, 0)
_MOST_LINES = 8
_CALM = 32
"""Number of snapshots in a row that none may be skipped among before a rank saves more often again; doubled each time
that this was too early."""


def _every(iterations: int, text: str, one: str) -> str:
    return one if iterations == 1 else text.format(f"{iterations} iterations")


class _Question:
    """Reservation to ask for."""

    def __init__(self, wanted: Reserve) -> None:
        self.wanted = wanted
        self.over = threading.Event()

    def end(self) -> None:
        self.over.set()


class Saver:
    """One per process."""

    def __init__(self, place: Place, make_hasher: MakeHasher) -> None:
        self._place = place
        self._make_hasher = make_hasher
        self._left = threading.Event()
        """Set while what is on its way is given up."""
        self._connection = KeeperConnection(place, self._left)
        self._optimizers = Optimizers(self._before_step)
        self._staging = Staging()
        self._snapshot: Snapshot | None = None
        self._question: _Question | None = None
        self._jobs: queue.SimpleQueue[Snapshot | _Question] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._bytes_per_s = _FIRST_SPEED
        self._stride = 1
        """Every which of the wanted snapshots is saved: a power of 2, so that all ranks have some in common."""
        self._wanted = 0
        """Number of wanted snapshots for which there was a segment."""
        self._calm = _CALM
        self._changed = 0
        """Number of the wanted snapshot from which this rank saves as often as it does."""
        self._is_eased = False
        """Whether it saved less often before."""
        self._skipped: int | None = None
        """Number of the wanted snapshot that was skipped last."""
        self._is_blocked = False
        """Whether the snapshot on its way has made `save` skip one before it had a segment."""
        self._reserve = _NOTHING
        """Last reservation that was granted."""
        self._refused: Reserve | None = None
        self._quiet_until_s = 0.0
        self._has_warned = False
        self._lines = 0
        self._interval = 0
        """Greatest common divisor of the iterations that were to be saved without an interval."""
        self.verified: int | None = None
        """Newest iteration of this process that is verified."""
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._stop)

    @property
    def pickle_key(self) -> str:
        """Key for the MAC of what this job pickles; empty until the thread has connected."""
        return self._connection.pickle_key

    def save(self, iteration: int, state: object, every: int | Literal["given"]) -> None:
        """Begin to save, unless this iteration isn't wanted or an earlier snapshot isn't done.

        ``every``: "given": the caller has an interval, which divides all iterations it asks for.

        Raises:
            SnapshotError: the state can't be kept.
        """
        if every == "given":
            every = self._interval = math.gcd(self._interval, iteration) or 1
        if iteration % (every * self._stride) or os.getpid() != self._pid:
            return
        if not self._is_busy(every):
            self._begin(iteration, state)

    def _begin(self, iteration: int, state: object) -> None:
        self._optimizers.watch()
        gathered = gather(state)
        later, now = apart(gathered.sources, self._optimizers.owned())
        if not self._has_room(gathered, copied_bytes(later, now)) or not self._start_thread():
            return
        try:
            copied = self._staging.copy_now(now)
            staged, event = self._staging.send(later, now)
        except (RuntimeError, MemoryError) as error:  # torch's, if memory doesn't suffice
            self._warn(error)
            return
        self._snapshot = Snapshot(
            iteration,
            self._place.info,
            gathered,
            later=later,
            copied=[*copied, *staged],
            event=event,
            bytes_later=sum(each.entry.nbytes for each in later),
        )
        self._jobs.put(self._snapshot)

    def wait(self) -> None:
        """Return when no snapshot is on its way any more; one that gets no segment is given up."""
        deadline_s = time.monotonic() + _GRANT_S
        while self._snapshot is not None and not self._snapshot.over.wait(0.1):
            if not self._lives():
                return
            if time.monotonic() > deadline_s and not self._snapshot.granted.is_set():
                self.disconnect()

    def disconnect(self) -> None:
        """Give up what is on its way and close the connection; the thread is at rest then. The next `save` connects."""
        if self._snapshot is not None:
            self._snapshot.give_up()
        self._left.set()
        for job in (self._snapshot, self._question):
            while job is not None and self._lives() and not job.over.wait(0.1):
                pass
        self._connection.close()
        self._left.clear()

    # -- the training thread ----------------------------------------------------------------------------------

    def _before_step(self) -> None:
        snapshot, thread = self._snapshot, self._thread
        if snapshot is not None and thread is not None:
            snapshot.wait_read(thread, self._bytes_per_s)

    def _is_busy(self, every: int) -> bool:
        """Return True if something is on its way; then a snapshot is skipped."""
        if not self._lives():  # an exception has ended it
            for job in (self._snapshot, self._question):
                if job is not None:
                    job.end()
        if self._question is not None and not self._question.over.is_set():
            return True
        snapshot = self._snapshot
        if snapshot is not None and not snapshot.over.is_set():
            if snapshot.granted.is_set():
                self._wanted += 1
                self._save_less(every)
            else:  # many may be skipped until there is a segment: all of them count as one
                self._is_blocked = True
            return True
        self._wanted += 1
        if self._is_blocked or (snapshot is not None and isinstance(snapshot.error, GivenUpError)):
            self._save_less(every)
            self._skipped = self._wanted  # even one more counts: beside a rank that rarely saves this is rarely seen
        else:
            self._save_more(every)
        self._is_blocked = False
        return False

    def _save_more(self, every: int) -> None:
        """Save more often again, if no snapshot was skipped for long."""
        if self._stride > 1 and self._wanted - max(self._skipped or 0, self._changed) > self._calm:
            self._stride, self._changed, self._is_eased = self._stride // 2, self._wanted, True
            self._say_stride(every, "memory checkpoints are quick enough")

    def _save_less(self, every: int) -> None:
        """Note a snapshot that took too long; at the second one of late, save less often."""
        is_repeated = self._skipped is not None and self._wanted - self._skipped <= _SKIP_WINDOW
        self._skipped = self._wanted
        if is_repeated:
            if self._is_eased and self._wanted - self._changed <= self._calm:
                self._calm *= 2  # that was too early
            self._stride, self._skipped = 2 * self._stride, None
            self._changed, self._is_eased = self._wanted, False
            between = _every(every * self._stride // 2, "the {} between two", "an iteration")
            self._say_stride(every, f"memory checkpoints take longer than {between}")

    def _say_stride(self, every: int, why: str) -> None:
        self._lines += 1
        if self._lines <= _MOST_LINES:  # of this rank: another one's would tell nothing about it
            often = _every(every * self._stride, "every {}", "every iteration")
            RANK.say(NOTICE, f"{why}; rank {self._place.info.global_rank} saves {often} from now on")

    def _warn(self, error: BaseException) -> None:
        if not self._has_warned:  # torch's texts have numbers that differ each time
            self._has_warned = True
            reason = (str(error) or type(error).__name__).splitlines()[0]
            say.warn_of_rank(f"a memory checkpoint is given up, training goes on: {reason}")

    def _has_room(self, gathered: Gathered, copies_bytes: int) -> bool:
        """Return True if the keeper has reserved memory for this state; it is asked when the state is larger.

        The thread asks: a keeper that doesn't answer holds up training for a moment, and not again for minutes.
        """
        had = self._reserve
        if (
            gathered.data_bytes + TRAILER_BYTES <= had.segment_bytes - _LAYOUT_SLACK
            and copies_bytes <= had.copies_bytes
        ):
            return True
        if time.monotonic() < self._quiet_until_s:
            return False
        entries = tuple(each.entry for each in gathered.sources)
        key = SnapshotKey(self._place.info.cycle, 0)
        info = self._place.info
        layout = encode(Layout(key, info.global_rank, info.world_size, entries, gathered.values))
        wanted = Reserve(gathered.data_bytes + len(layout) + TRAILER_BYTES + 2 * _LAYOUT_SLACK, copies_bytes)
        if wanted == self._refused or not self._start_thread():
            return False
        self._question = question = _Question(wanted)
        self._jobs.put(question)
        return question.over.wait(_ASK_S) and self._reserve == wanted

    def _lives(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _start_thread(self) -> bool:
        """Return False if there is none."""
        if self._lives():
            return True
        self._jobs = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(self._jobs,), name="ft_memory", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # "can't start new thread"
            self._warn(error)
            return False
        self._thread = thread
        return True

    def _forget(self) -> None:
        """In a child of this process: the connection, the thread and the snapshot are the parent's."""
        self._connection.close()
        if self._snapshot is not None:
            self._snapshot.close()
        self._snapshot = self._question = self._thread = None

    def _stop(self) -> None:
        """At the end of the script: a snapshot on its way is given up, which takes as long as a block."""
        if self._snapshot is not None and self._thread is not None and self._thread.is_alive():
            self._snapshot.stop(_STOP_S)

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self, jobs: queue.SimpleQueue[Snapshot | _Question]) -> None:
        while True:
            job = jobs.get()
            try:
                if isinstance(job, Snapshot):
                    self._save(job)
                else:
                    self._answer(job)
            finally:
                job.end()  # whatever was raised
            del job

    def _answer(self, question: _Question) -> None:
        try:
            self._ask(question.wanted)
        except RefusedError:
            self._refused = question.wanted  # the launcher has printed why
        except SnapshotError as error:
            if not self._left.is_set():
                say.warn_of_rank(f"no memory checkpoint is saved: {error}")

    def _ask(self, wanted: Reserve) -> None:
        """Reserve memory.

        Raises:
            RefusedError: there isn't enough.
            SnapshotError: the keeper doesn't answer, or not to this rank; it isn't asked again for a while.
        """
        self._reserve = _NOTHING
        try:
            self._connection.open()
        except SnapshotError as error:
            self._be_quiet()
            raise SnapshotError(str(error)) from None  # a hello that is refused says nothing about memory
        try:
            self._connection.ask(wanted, Reserved, _RESERVE_S)
        except SnapshotError as error:
            if not isinstance(error, RefusedError):
                self._be_quiet()
            raise
        self._reserve = wanted

    def _be_quiet(self) -> None:
        if not self._left.is_set():
            self._quiet_until_s = time.monotonic() + _QUIET_S

    def _save(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except GivenUpError as error:
            snapshot.error = error
        except SnapshotError as error:
            snapshot.error = error
            if not self._left.is_set():
                say.warn_of_rank(f"memory checkpoint of iteration {snapshot.iteration} is given up: {error}")

    def _write(self, snapshot: Snapshot) -> None:
        if not self._connection.is_open:  # the keeper is another one, and knows nothing of this rank
            self._ask(self._reserve)  # if it is refused, the next snapshot asks again
        snapshot.write(self._connection, self._make_hasher)
        self.verified = snapshot.iteration
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
