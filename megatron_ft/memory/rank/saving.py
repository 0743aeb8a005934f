"""Saves this rank's snapshots. `Saver.save` copies the state and returns; digests and all else follow in a thread.

The thread keeps one segment of the node allocated and mapped for the next snapshot. Once that is filled, the thread
computes digests from the segment, lets go of it, has the keeper verify it, and maps the next one. A snapshot that is
due meanwhile is skipped, and the next one is taken at a multiple of a power of 2: so slow and quick ranks have those of
the slowest in common.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_ft.errors import SnapshotError
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.keeper_messages import CommitSegment, RankBegan
from megatron_ft.memory.base.node_memory import node_memory
from megatron_ft.memory.base.segment import CHUNK_BYTES
from megatron_ft.memory.rank import restoring
from megatron_ft.memory.rank.copying import LOCKED_BYTES, Mapping, Plan, copy_tensors, find_unfit, memory_at, plan_for
from megatron_ft.memory.rank.keeper_connection import KeeperConnection, Place, RefusedError
from megatron_ft.memory.rank.state_tree import take_apart
from megatron_ft.memory.rules.retention import BeginSegment, refuse_chunk
from megatron_ft.memory.rules.segment_layout import (
    DIGEST_BYTES,
    MAX_LAYOUT_BYTES,
    TRAILER_BYTES,
    encode_head,
    name_of,
    path_of,
)
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.rank.base import say

_WAIT_S = 10.0
"""Seconds that `save` waits for a segment the first time, and for a larger one."""
_WAIT_SHARE = 0.05
"""Part of the time since the last snapshot that `save` waits for the thread."""
_MOST_SKIPPED = 15
_ANSWER_S = 600.0
_STOP_S = 2.0
_SLACK = 1 << 16
"""Bytes by which a layout may grow without a new reservation."""
_MISSED = 10
"""Number of snapshots in a row that fail before the user is told."""
_MEASURED = 3
"""Number of snapshots after which the user is told what they cost, the first one, which waits for memory, left out."""
_SHARE = 0.01
"""Part of the time that snapshots may hold up training."""


def is_aligned(number: int, skipped: int) -> bool:
    """Return True if this snapshot may be taken: its number is a multiple of the least power of 2 above ``skipped``."""
    return number % (1 << skipped.bit_length()) == 0


def allocate(fd: int, nbytes: int) -> None:
    """Allocate the memory of a segment, asking before each chunk whether the node has it."""
    for offset in range(0, nbytes, CHUNK_BYTES):
        count = min(CHUNK_BYTES, nbytes - offset)
        if refused := refuse_chunk(count, node_memory()):
            raise OSError(refused)
        os.posix_fallocate(fd, offset, count)


class Saver:
    """One per process."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._connection = KeeperConnection(place)
        self._lock = threading.Lock()
        """Held by the one `save` that runs."""
        self._thread: threading.Thread | None = None
        """Finishes a snapshot, and gets the segment for the next one."""
        self._skipped = 0
        """Number of snapshots in a row that were skipped because the thread was busy."""
        self._returned_s = 0.0
        self._mapping: Mapping | None = None
        """Segment for the next snapshot."""
        self._plan: Plan | None = None
        self._wanted = BeginSegment(0)
        self._era, self._newest = 0, -1
        """Of the iterations that `save` was called for."""
        self._last_saved: SnapshotKey | None = None
        self._failed = 0
        """Number of snapshots since the last verified one."""
        self._reason = ""
        self._is_failing = False
        """A snapshot was given up with a line, and none has been verified since."""
        self._taken, self._held_s, self._since_s, self._first = 0, 0.0, 0.0, 0
        """Number of snapshots, and what all but the first have cost; time and iteration of the first one."""
        self.verified: SnapshotKey | None = None
        """Newest snapshot of this process that is verified."""
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._stop)

    # -- the training thread ----------------------------------------------------------------------------------

    def key_of(self, iteration: int) -> SnapshotKey:
        """Return the key of a snapshot that is saved next."""
        era = self._era + (iteration < self._newest)
        return SnapshotKey(self._place.info.cycle, era, iteration)

    def save(self, iteration: int, state: object, every: int) -> None:
        """Copy the state if this iteration is due. Nothing is awaited but an earlier snapshot of this rank.

        Raises:
            SnapshotError: the state can't be kept, and none has been kept before.
        """
        if not self._lock.acquire(blocking=False):
            say.warn_of_rank("a memory checkpoint is skipped: save was called while another save runs")
            return
        try:
            key = self.key_of(iteration)
            self._era, self._newest = key.era, iteration
            if iteration % every:
                return
            if key == self._last_saved:
                say.warn_of_rank(f"memory checkpoint of iteration {iteration} is skipped: it was saved before")
                return
            began_s = time.monotonic()
            self._reason = self._save(key, state, iteration // every) or self._reason
            self._returned_s = time.monotonic()
            self._count(began_s, iteration)
        finally:
            self._lock.release()

    def _save(self, key: SnapshotKey, state: object, number: int) -> str:
        """Return why there is no snapshot; empty if it is on its way. ``number``: of those that are due."""
        bound_s = min(_WAIT_S, _WAIT_SHARE * (time.monotonic() - self._returned_s))
        if not is_aligned(number, self._skipped) or not self.wait(bound_s):
            self._skipped = min(self._skipped + 1, _MOST_SKIPPED)
            return "the snapshot before isn't verified yet"
        self._skipped = 0
        try:
            head, tensors, plan = self._prepare(key, state)
            need = plan.data_bytes + len(head) + DIGEST_BYTES * len(tensors) + TRAILER_BYTES
            if self._mapping is None or self._mapping.nbytes < need:
                # the next layout that is a little longer must not need another segment
                wanted = max(self._wanted.segment_bytes, need + (need - plan.data_bytes) // 4 + _SLACK)
                is_on_device = any(each.is_cuda for each in tensors)
                self._wanted = BeginSegment(wanted, min(LOCKED_BYTES, 2 * plan.data_bytes) if is_on_device else 0)
                self._finish(None)
                if not self.wait(_WAIT_S) or self._mapping is None or self._mapping.nbytes < need:
                    return self._reason or "there is no memory for it"
            copy_tensors(tensors, plan, self._mapping)
        except (SnapshotError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: torch's
            if isinstance(error, SnapshotError) and not self._taken:
                raise
            return self._warn(key.iteration, error)
        self._last_saved, self._taken = key, self._taken + 1
        self._finish(partial(self._commit, self._mapping, key, head, plan))
        return ""

    def _prepare(self, key: SnapshotKey, state: object) -> tuple[bytes, list[Any], Plan]:
        """Return the head of the snapshot, its tensors, and where they go."""
        tree, tensors = take_apart(state)
        if (unfit := find_unfit(tensors)) is not None:
            raise SnapshotError(f"{name_of(path_of(tree, unfit[0]) or ())} {unfit[1]}")
        plan = self._plan = plan_for(tensors, self._plan)
        rank, world = self._place.info.global_rank, self._place.info.world_size
        try:
            head = encode_head(key, rank, world, plan.rows, tree)
        except (OverflowError, UnicodeEncodeError):
            head = encode_head(key, rank, world, plan.rows, take_apart(state, carefully=True)[0])
        if len(head) + DIGEST_BYTES * len(tensors) > MAX_LAYOUT_BYTES:
            raise SnapshotError(
                f"the state beside its tensors has {len(head)} bytes, at most {MAX_LAYOUT_BYTES} are kept"
            )
        return head, tensors, plan

    def _finish(self, commit: Callable[[], None] | None) -> None:
        """Have a filled segment verified in a thread, which gets the next one; None: only that."""
        thread = threading.Thread(target=self._run, args=(commit,), name="ft_memory", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except (RuntimeError, MemoryError) as error:  # "can't start new thread"
            self._reason = self._warn(self._newest, error)

    def _count(self, began_s: float, iteration: int) -> None:
        """Tell the user, once each, that there are no snapshots, and what they cost."""
        self._failed += 1
        if self._failed > _MISSED and self._reason:
            say.warn_of_rank(f"none of the last {_MISSED} memory checkpoints was kept: {self._reason}")
        now_s = time.monotonic()
        if self._taken > 1:
            self._held_s += now_s - began_s
        if self._taken == 1 and not self._since_s:
            self._since_s, self._first = now_s, iteration
        elif self._taken == _MEASURED and self._since_s and self._place.info.cycle == 0:
            share, interval = self._held_s / (now_s - self._since_s), (iteration - self._first) / (_MEASURED - 1)
            enough = math.ceil(interval * share / _SHARE)
            hint = f"; every={enough} makes it {_SHARE:.0%}" if share > _SHARE and interval > 0 else ""
            say.note(f"memory checkpoints hold up training for {share:.1%} of the time{hint}")
            self._since_s = 0.0

    def _warn(self, iteration: int, error: BaseException) -> str:
        """Say, once, why a snapshot is given up. Return the reason."""
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if not self._is_failing:
            say.warn_of_rank(f"memory checkpoint of iteration {iteration} is given up, training goes on: {reason}")
        self._is_failing = True
        return reason

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no snapshot is on its way and the next one can be taken. Return False if that takes longer."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _forget(self) -> None:
        """In a child of this process: the connection and the thread are the parent's, and the segment isn't mapped."""
        self._connection.close()
        if self._mapping is not None:
            with contextlib.suppress(OSError):
                os.close(self._mapping.fd)
        self._thread = self._mapping = None

    def _stop(self) -> None:
        """At the end of the script: what is on its way may still arrive, for a moment."""
        until_s = time.monotonic() + _STOP_S
        while self.verified != self._last_saved and not self.wait(0.01) and time.monotonic() < until_s:
            pass

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self, commit: Callable[[], None] | None) -> None:
        """Have a filled segment verified, and allocate and map the segment for the next snapshot."""
        try:
            if commit is not None:
                commit()
            self._let_go()
            if self._connection.open(must=False) and self._place.restore is not None and not restoring.has_restored:
                self._connection.tell(RankBegan(self._place.restore))  # it trains without what was chosen
            # there may be none as yet: copies to another node are under way
            request = self._wanted
            _, fd = self._connection.ask(request, _ANSWER_S, fds=1)
            try:
                allocate(fd, request.segment_bytes)
                self._mapping = Mapping(fd, request.segment_bytes)
            except OSError:
                os.close(fd)
                raise
        except RefusedError as error:
            self._reason = str(error)  # the launcher has printed it
        except Exception as error:  # noqa: BLE001 - whatever it is: it costs a snapshot, and training goes on
            self._let_go()
            self._connection.close()
            self._reason = self._warn(self._newest, error)

    def _commit(self, mapping: Mapping, key: SnapshotKey, head: bytes, plan: Plan) -> None:
        digest = self._place.digest
        assert digest is not None
        try:
            parts = zip(plan.offsets, plan.nbytes, strict=True)
            digests = [digest([memory_at(mapping.address + at, nbytes)]) for at, nbytes in parts]
            length = segment.write_end(mapping.fd, head, digests, plan.data_bytes, digest)
        finally:
            self._let_go()  # a segment that is mapped can't be sealed
        self._connection.ask(CommitSegment(key, length), _ANSWER_S)
        self.verified, self._failed, self._is_failing = key, 0, False

    def _let_go(self) -> None:
        """Give back the mapped segment."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.close()
            os.close(mapping.fd)


running: Saver | None = None
"""Saver of this process if it has saved before."""


def saver(place: Place) -> Saver:
    """Return the saver of this process."""
    global running
    running = running or Saver(place)
    return running
