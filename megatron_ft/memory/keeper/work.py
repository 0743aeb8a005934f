"""Work that takes long, in threads of the keeper: comparing digests, moving segments, freeing memory."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
from collections.abc import Callable

from megatron_ft.core.errors import LayoutError, SnapshotError
from megatron_ft.ipc.linux.node_memory import node_memory
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.digests import Digest
from megatron_ft.memory.base.segment import CHUNK_BYTES
from megatron_ft.memory.rules.retention import refuse_chunk
from megatron_ft.memory.rules.segment_layout import Layout

_NICENESS = 10

Result = Callable[[], object]


class BackgroundWorker:
    """Threads with a queue of jobs; what each returns is handed to ``post``, to be called in the keeper's loop."""

    def __init__(self, name: str, post: Callable[[Result], None], threads: int = 1) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()
        self._name = name
        self._post_result = post
        self._left = threads
        """Number of threads that may still be started."""

    def post(self, job: Callable[[], Result]) -> None:
        self._jobs.put(job)
        if self._left:
            self._left -= 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread alone
        while True:
            try:
                self._post_result(self._jobs.get()())
            except BaseException:  # noqa: BLE001 - whatever it is: without this thread the keeper is of no use
                traceback.print_exc()
                os._exit(1)  # the launcher starts another keeper


def room_maker(is_wanted: Callable[[], bool]) -> Callable[[int], None]:
    """Return what is called with the number of bytes of each block of a segment that comes.

    It raises SnapshotError if the node hasn't the memory, or the segment isn't wanted any more.
    """
    left = 0

    def make_room(count: int) -> None:
        nonlocal left
        left -= count
        if left < 0:
            left += max(CHUNK_BYTES, count)
            refused = refuse_chunk(CHUNK_BYTES, node_memory()) or ("" if is_wanted() else "no longer needed")
            if refused:
                raise SnapshotError(refused)

    return make_room


def why(error: Exception) -> str:
    """Return what a user is told of an error."""
    return getattr(error, "strerror", None) or str(error) or "it doesn't answer"


def check(fd: int, digest: Digest, is_wanted: Callable[[], bool] = lambda: True) -> Layout | str:
    """Return the layout of a sealed segment once all digests are compared, or what is wrong with it."""
    try:
        layout = segment.read_layout(fd, digest)
        buffer = memoryview(bytearray(segment.BLOCK_BYTES))
        for index in range(len(layout.tensors)):
            if not is_wanted():
                return "no longer needed"
            segment.verify(fd, layout, index, buffer, digest)
    except LayoutError as error:
        return str(error)
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    return layout
