"""Work that takes long, in threads of the keeper: comparing digests, moving segments, freeing memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from megatron_ft.errors import LayoutError, SnapshotError
from megatron_ft.link.reactor import Reactor
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.digests import Digest
from megatron_ft.memory.base.node_memory import node_memory
from megatron_ft.memory.base.segment import CHUNK_BYTES
from megatron_ft.memory.rules.retention import refuse_chunk
from megatron_ft.memory.rules.segment_layout import Layout

_NICENESS = 10

_T = TypeVar("_T")


def aside(reactor: Reactor, job: Callable[[], _T], then: Callable[[_T], None]) -> None:
    """Do a job in a thread of low priority, and call ``then`` with its result in the keeper's loop."""

    def run() -> _T:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread alone
        return job()

    # an unexpected error ends the keeper, and the launcher starts another one
    reactor.call_in_thread(run, lambda result: then(result()))


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
