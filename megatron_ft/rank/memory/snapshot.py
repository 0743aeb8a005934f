"""One snapshot on its way from this rank's tensors into a segment."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.memory.segment_layout import TRAILER_BYTES, Layout, Path, encode, name_of
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.core.messages.keeper_messages import Abandon, BeginSegment, CommitSegment, Verified
from megatron_ft.ipc.memory import segment
from megatron_ft.ipc.memory.digests import MakeHasher
from megatron_ft.rank.base.agreement import RankInfo
from megatron_ft.rank.memory.keeper_connection import KeeperConnection
from megatron_ft.rank.memory.tensors import Gathered, Source, memory_of

_SEGMENT_S = 600.0
_VERIFIED_S = 600.0
_GRANT_S = 0.5
"""Seconds that an optimizer step waits for a segment whose memory isn't allocated yet."""
_LEAST_S = 2.0
_PATIENCE = 4.0


class GivenUpError(SnapshotError):
    """Raised in the thread that writes a snapshot, because training goes on without it."""


class Snapshot:
    """Written by ``write`` in a thread; the training thread calls the rest."""

    def __init__(
        self,
        iteration: int,
        info: RankInfo,
        gathered: Gathered,
        *,
        later: Sequence[Source],
        copied: Sequence[Source],
        event: Any,
        bytes_later: int,
    ) -> None:
        """``later``: read after `save` has returned, those of a device by the copies that are complete after ``event``.

        ``copied``: copies; None as ``event``: complete. ``bytes_later``: of ``later``.
        """
        self.iteration = iteration
        self._info = info
        self._entries = [each.entry for each in gathered.sources]
        self._values = gathered.values
        self._data_bytes = gathered.data_bytes
        self._later = list(later)
        self._copied = sorted(copied, key=lambda each: each.entry.offset)
        self._event = event
        self._versions = [_version(each) for each in later]
        self._lock = threading.Lock()
        self._is_given_up = False
        self._read = threading.Event()
        """Set once training may change its tensors, whatever has become of the snapshot."""
        self.over = threading.Event()
        self.granted = threading.Event()
        self._at_rest = threading.Event()
        """Set unless the thread reads memory of tensors."""
        self._at_rest.set()
        self._fd = -1
        self.bytes_later = bytes_later
        self.read_s = 0.0
        """Seconds it took to read the tensors of the optimizer; 0 if they weren't read."""
        self.error: SnapshotError | None = None
        """Why there is no snapshot; None if it is verified or not over."""

    @property
    def is_given_up(self) -> bool:
        return self._is_given_up

    # -- the training thread ----------------------------------------------------------------------------------

    def wait_read(self, thread: threading.Thread, bytes_per_s: float) -> None:
        """Return when training may change its tensors: they are read, or will never be.

        Waits in proportion to what is to be read, at the speed measured so far, and no longer than ``thread`` lives.
        """
        if self._read.is_set():
            return
        began_s = time.monotonic()
        bound_s = _LEAST_S + _PATIENCE * self.bytes_later / bytes_per_s
        while not self._read.wait(0.05):
            waited_s = time.monotonic() - began_s
            is_late = waited_s > (bound_s if self.granted.is_set() else _GRANT_S)
            if is_late or not thread.is_alive():
                if self.give_up():
                    return

    def give_up(self) -> bool:
        """Have the thread read no more, and drop what it has read. Return False if it has read everything."""
        with self._lock:
            if self._read.is_set() and not self._is_given_up:
                return False
            self._is_given_up = True
            self._read.set()
            return True

    def stop(self, timeout_s: float) -> None:
        """Have the thread touch no more memory, and wait for that: at the end of the process memory is freed."""
        with self._lock:
            self._is_given_up = True
            self._read.set()
        self._at_rest.wait(timeout_s)

    def end(self) -> None:
        """Release all that wait for the thread, which is done with this snapshot."""
        self._let_go()
        self.over.set()

    def close(self) -> None:
        """Close the segment's descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # -- the thread -------------------------------------------------------------------------------------------

    def write(self, connection: KeeperConnection, make_hasher: MakeHasher) -> None:
        """Fill a segment, commit it, and return once the keeper has verified it.

        Raises:
            SnapshotError: there is no snapshot, and why.
        """
        try:
            room = len(encode(self._layout({}))) + TRAILER_BYTES
            request = BeginSegment(self.iteration, self._data_bytes + room)
            self._fd = connection.ask_segment(request, _SEGMENT_S)
            self.granted.set()
            length = self._fill(self._fd, make_hasher)
        except (OSError, RuntimeError, MemoryError, SnapshotError) as error:  # RuntimeError: torch's
            with contextlib.suppress(SnapshotError):
                if self._fd >= 0:
                    connection.tell(Abandon(self.iteration))
            if self._is_given_up and not isinstance(error, GivenUpError):
                raise GivenUpError(str(error)) from None
            raise error if isinstance(error, SnapshotError) else SnapshotError(str(error)) from None
        finally:
            self._let_go()
            self.close()
        connection.ask(CommitSegment(self.iteration, length), Verified, _VERIFIED_S)

    def _let_go(self) -> None:
        """Release the tensors: they may change, and be freed."""
        self._read.set()
        if self._event is not None:
            with contextlib.suppress(RuntimeError):  # the device has failed: nothing is copied any more
                self._event.synchronize()
        self._later.clear()
        self._copied.clear()
        self._event = None
        self._at_rest.set()

    def _fill(self, fd: int, make_hasher: MakeHasher) -> int:
        digests: dict[Path, str] = {}
        with self._lock:
            if self._is_given_up:
                raise GivenUpError("training went on before it was read")
            self._at_rest.clear()
        began_s = time.monotonic()
        if self._event is not None:
            self._event.synchronize()
        # of a tensor on a device its copy is written
        self._write_all(fd, [each for each in self._later if not each.tensor.is_cuda], digests, make_hasher)
        self._end_reading()
        self.read_s = time.monotonic() - began_s
        self._write_all(fd, self._copied, digests, make_hasher)
        if self._is_given_up:  # the copies may belong to another snapshot by now
            raise GivenUpError("training went on")
        return segment.write_end(fd, encode(self._layout(digests)), self._data_bytes, make_hasher)

    def _write_all(self, fd: int, sources: Iterable[Source], digests: dict[Path, str], make_hasher: MakeHasher) -> None:
        """Write tensors, and note the digest of what each was when it was read.

        Small ones are written together: after each system call the thread waits for the interpreter, for up to 5 ms
        where training runs Python.
        """
        small = segment.BlockWriter(fd)
        for source in sources:
            hasher, offset, memory = make_hasher(), source.entry.offset, memory_of(source.tensor)
            for block in _blocks(memory):
                if self._is_given_up:
                    raise GivenUpError("training went on before it was read")
                hasher.update(block)
                small.write(block, offset)
                offset += len(block)
            digests[source.entry.path] = hasher.hexdigest()
        small.flush()

    def _end_reading(self) -> None:
        with self._lock:
            if self._is_given_up:
                raise GivenUpError("training went on before it was read")
            pairs = zip(self._later, self._versions, strict=True)
            changed = [each.entry.path for each, version in pairs if _version(each) != version]
            self._read.set()
        if changed:
            raise SnapshotError(f"{name_of(changed[0])} was changed outside the optimizer's step while it was read")

    def _layout(self, digests: dict[Path, str]) -> Layout:
        """Return the layout; tensors without a digest have one of the same length."""
        entries = [replace(each, digest=digests.get(each.path, each.digest)) for each in self._entries]
        key = SnapshotKey(self._info.cycle, self.iteration)
        return Layout(key, self._info.global_rank, self._info.world_size, tuple(entries), self._values)


def _blocks(memory: memoryview) -> Iterator[memoryview]:
    return (memory[at : at + segment.BLOCK_BYTES] for at in range(0, len(memory), segment.BLOCK_BYTES))


def _version(source: Source) -> int:
    return int(source.tensor._version)
