"""Work that takes long, in threads of the keeper: allocating memory, and comparing digests."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable

from megatron_ft.core.errors import LayoutError
from megatron_ft.ipc.linux.node_memory import node_memory
from megatron_ft.memory.base import segment, segment_files
from megatron_ft.memory.base.digests import MakeHasher
from megatron_ft.memory.rules.retention import refuse_chunk
from megatron_ft.memory.rules.segment_layout import Layout

_CHUNK = 64 << 20
_NICENESS = 10

Result = Callable[[], None]


class BackgroundWorker:
    """One thread with a queue of jobs; what each returns is handed to ``post``, to be called in the keeper's loop."""

    def __init__(self, name: str, post: Callable[[Result], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()
        self._post_result = post
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, job: Callable[[], Result]) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread alone
        while True:
            try:
                self._post_result(self._jobs.get()())
            except BaseException:  # noqa: BLE001 - whatever it is: without this thread the keeper is of no use
                traceback.print_exc()
                os._exit(1)  # the launcher starts another keeper


def allocate(fd: int, nbytes: int, is_wanted: Callable[[], bool]) -> str:
    """Allocate the memory of a segment, asking before each chunk whether it fits. Return why it doesn't, or ""."""
    for offset in range(0, nbytes, _CHUNK):
        if not is_wanted():
            return "no longer needed"
        count = min(_CHUNK, nbytes - offset)
        try:
            refused = refuse_chunk(count, node_memory())
            if refused:
                return refused
            os.posix_fallocate(fd, offset, count)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def check(fd: int, make_hasher: MakeHasher, is_wanted: Callable[[], bool] = lambda: True) -> Layout | str:
    """Return the layout of a sealed segment once all digests are compared, or what is wrong with it."""

    def pause() -> None:
        time.sleep(0)
        if not is_wanted():
            raise LayoutError("no longer needed")

    try:
        layout = segment.read_layout(fd, make_hasher)
        segment.verify(fd, layout, make_hasher, pause)
    except LayoutError as error:
        return str(error)
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    return layout


def load_file(
    path: str, rank: int, world: int, make_hasher: MakeHasher, is_wanted: Callable[[], bool]
) -> tuple[int, str]:
    """Return the descriptor of a sealed segment with the content of a rank's file; or -1, and why there is none.

    ``path``: of the directory of the snapshot.
    """

    def make_room(count: int) -> None:
        refused = refuse_chunk(count, node_memory())
        if refused or not is_wanted():
            raise LayoutError(refused or "no longer needed")

    directory, name = os.path.split(path)
    try:
        return segment_files.load(directory, name, rank, world, make_hasher, make_room), ""
    except (LayoutError, OSError) as error:
        return -1, getattr(error, "strerror", None) or str(error)
