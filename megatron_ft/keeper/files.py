"""Segments in files: written at the end of the job's life, and loaded by the next life."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from megatron_ft.core.errors import LayoutError
from megatron_ft.core.memory.retention import refuse_chunk
from megatron_ft.core.memory.saved_files import consecutive
from megatron_ft.core.messages.keeper_messages import FilesWritten, WriteFiles
from megatron_ft.ipc.linux.node_memory import node_memory
from megatron_ft.ipc.memory import segment_files
from megatron_ft.ipc.memory.digests import MakeHasher
from megatron_ft.ipc.memory.segment_files import SegmentToWrite


class _TooLateError(Exception):
    """Raised when the time for writing is over."""


class _NoRoomError(Exception):
    """Raised when memory doesn't suffice for a file."""


def write(
    order: WriteFiles, segments: Sequence[SegmentToWrite], world: int, make_hasher: MakeHasher, until_s: float
) -> FilesWritten:
    """Write the segments, in as many parts as their ranks have gaps; the last one is complete, or isn't there."""

    def check() -> None:
        if time.monotonic() > until_s:
            raise _TooLateError

    began_s, nbytes, by_rank = time.monotonic(), 0, {each.rank: each for each in segments}
    try:
        for ranks in consecutive(by_rank):
            part = [by_rank[rank] for rank in ranks]
            nbytes += segment_files.write_part(order.directory, order.name, part, order.key, world, make_hasher, check)
    except _TooLateError:
        return FilesWritten(why="there was no more time")
    except (OSError, LayoutError) as error:
        return FilesWritten(why=getattr(error, "strerror", None) or str(error))
    return FilesWritten(nbytes, time.monotonic() - began_s)


def load(path: str, rank: int, world: int, make_hasher: MakeHasher, is_wanted: Callable[[], bool]) -> tuple[int, str]:
    """Return the descriptor of a sealed segment with the content of a rank's file; or -1, and why there is none.

    ``path``: of the directory of the snapshot.
    """

    def make_room(count: int) -> None:
        refused = refuse_chunk(count, node_memory())
        if refused or not is_wanted():
            raise _NoRoomError(refused or "no longer needed")

    directory, name = os.path.split(path)
    try:
        return segment_files.load(directory, name, rank, world, make_hasher, make_room), ""
    except (LayoutError, _NoRoomError) as error:
        return -1, str(error)
    except OSError as error:
        return -1, error.strerror or str(error)
