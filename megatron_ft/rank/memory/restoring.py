"""Restores this rank's state from a verified segment, in place."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, NamedTuple

from megatron_ft.core.errors import SnapshotError
from megatron_ft.core.facts.launcher import RestoreFailed
from megatron_ft.core.memory.segment_layout import Layout, Path, TensorAt, TensorEntry, name_of
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.core.messages.keeper_messages import Fetch, RankRestored
from megatron_ft.ipc.log import ERROR, RANK
from megatron_ft.ipc.memory import segment
from megatron_ft.ipc.memory.digests import MakeHasher
from megatron_ft.rank.memory.keeper_connection import KeeperConnection, Place, RefusedError
from megatron_ft.rank.memory.staging import HostMemory
from megatron_ft.rank.memory.tensors import check_kind, is_tensor, memory_of

_FETCH_S = 600.0
_TOLD_S = 30.0


def restore(place: Place, key: SnapshotKey, state: object, make_hasher: MakeHasher | None) -> None:
    """Give ``state`` the content of the snapshot. Without ``make_hasher`` this fails.

    The launcher is told of a failure before it is raised: whatever the script does then, its cycle is over. If it can't
    be told, the process ends: its script would go on with another state than the other ranks.

    Raises:
        SnapshotError: this rank can't have that state.
    """
    began_s = time.monotonic()
    connection = KeeperConnection(place)
    try:
        _restore(connection, place, key, state, make_hasher)
        connection.tell(RankRestored(key, time.monotonic() - began_s))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:1000]
        failed = RestoreFailed(rank=place.info.global_rank, cycle=place.info.cycle, key=key, text=text)
        try:
            _tell(connection, failed)
        except SnapshotError as untold:
            _end_rank(failed, untold)
        if isinstance(error, OSError | RuntimeError):  # RuntimeError: torch's
            raise SnapshotError(f"iteration {key.iteration} can't be restored: {error}") from error
        raise
    finally:
        connection.close()


def read(place: Place, key: SnapshotKey, make_hasher: MakeHasher) -> dict[str | int, Any]:
    """Return the state of a snapshot, with its tensors on the CPU. The launcher isn't told.

    Raises:
        SnapshotError: it can't be had.
        OSError: it can't be read.
    """
    state: dict[str | int, Any] = {}
    connection = KeeperConnection(place)
    try:
        _restore(connection, place, key, state, make_hasher)
    finally:
        connection.close()
    return state


class Peek(NamedTuple):
    """Part of a snapshot's state. ``values``: with a `TensorAt` for each tensor."""

    values: Any
    tensor: Any
    pickle_key: str


def peek(place: Place, key: SnapshotKey, make_hasher: MakeHasher, name: str) -> Peek:
    """Return the values of a snapshot, and its tensor of that name, None if it has none. The launcher isn't told.

    Raises:
        SnapshotError: it can't be had.
        OSError: it can't be read.
    """
    connection = KeeperConnection(place)
    try:
        connection.open()
        fd = connection.ask_segment(Fetch(key), _FETCH_S)
        try:
            layout = _layout_of(fd, key, place.info.global_rank, place.info.world_size, make_hasher)
            at = layout.values.get(name) if isinstance(layout.values, dict) else None
            tensor = None
            if isinstance(at, TensorAt):
                unused = HostMemory(is_locked=False)  # of a tensor that is created
                tensor = _fill(fd, layout.tensors[at.index], None, make_hasher, (unused, unused))
            return Peek(layout.values, tensor, connection.pickle_key)
        finally:
            os.close(fd)
    finally:
        connection.close()


def _tell(connection: KeeperConnection, failed: RestoreFailed) -> None:
    """Return once the keeper has told the launcher: it reads in order, so that its answer comes after that.

    Raises:
        SnapshotError: it doesn't answer.
    """
    connection.close()  # an answer may be on its way
    connection.open()
    connection.tell(failed)
    with contextlib.suppress(RefusedError):  # that's an answer, too
        os.close(connection.ask_segment(Fetch(failed.key), _TOLD_S))


def _end_rank(failed: RestoreFailed, untold: SnapshotError) -> None:
    text = f"rank {failed.rank} can't restore iteration {failed.key.iteration} from memory: {failed.text}"
    RANK.say(ERROR, f"ERROR: {text}; the rank ends, as its launcher can't be told: {untold}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(1)


def _restore(
    connection: KeeperConnection, place: Place, key: SnapshotKey, state: object, make_hasher: MakeHasher | None
) -> None:
    if make_hasher is None:
        raise SnapshotError("xxhash isn't installed for this rank, or can't be loaded")
    if not isinstance(state, dict):
        raise SnapshotError(f"a state is a dict, not of type {type(state).__name__}")
    connection.open()
    fd = connection.ask_segment(Fetch(key), _FETCH_S)
    try:
        fill_from(fd, key, place.info.global_rank, place.info.world_size, state, make_hasher)
    finally:
        os.close(fd)


def fill_from(
    fd: int, key: SnapshotKey, rank: int, world: int, state: dict[str | int, Any], make_hasher: MakeHasher
) -> None:
    """Give ``state`` the content of a segment. Nothing of it is changed before all digests are compared.

    Raises:
        SnapshotError: the segment is damaged, or is of another state.
        OSError: it can't be read.
    """
    layout = _layout_of(fd, key, rank, world, make_hasher)
    plan = _Plan(layout)
    plan.match(state, layout.values, ())
    segment.verify(fd, layout, make_hasher)  # before the first tensor is touched
    on_device = any(each.is_cuda for each in plan.targets.values())
    # Host memory of which each byte is used often: new pages for each tensor took longer than to read and to copy it.
    room = HostMemory(is_locked=on_device), HostMemory(is_locked=on_device)
    tensors = [_fill(fd, entry, plan.targets.get(at), make_hasher, room) for at, entry in enumerate(layout.tensors)]
    _put(state, layout.values, tensors)


def _layout_of(fd: int, key: SnapshotKey, rank: int, world: int, make_hasher: MakeHasher) -> Layout:
    layout = segment.read_layout(fd, make_hasher)
    if (layout.key, layout.rank, layout.world) != (key, rank, world):
        raise SnapshotError(f"the segment is of rank {layout.rank} of {layout.world}, iteration {layout.key.iteration}")
    return layout


class _Plan:
    """Which of the caller's tensors gets which of the snapshot. ``targets``: by index; the others are created."""

    def __init__(self, layout: Layout) -> None:
        self._entries = layout.tensors
        self.targets: dict[int, Any] = {}

    def match(self, target: object, saved: Any, path: Path) -> None:
        """Compare a part of the caller's state with what was saved of it.

        Raises:
            SnapshotError: they don't fit together.
        """
        if isinstance(saved, TensorAt):
            self._match_tensor(target, saved.index, path)
        elif is_tensor(target):
            raise SnapshotError(f"{name_of(path)} is a tensor, but {type(saved).__name__} was saved")
        elif isinstance(saved, dict) and isinstance(target, dict):
            missing = [key for key in target if key not in saved]
            if missing:
                raise SnapshotError(f"{name_of((*path, missing[0]))} was not saved")
            for key, item in saved.items():
                if key in target:
                    self.match(target[key], item, (*path, key))
        elif isinstance(saved, (list, tuple)) and isinstance(target, (list, tuple)) and len(saved) == len(target):
            for at, item in enumerate(saved):
                self.match(target[at], item, (*path, at))
        elif _has_tensor(target):
            raise SnapshotError(f"{name_of(path)} has another structure than what was saved")

    def _match_tensor(self, target: object, index: int, path: Path) -> None:
        if target is None:
            return  # created
        if not is_tensor(target):
            raise SnapshotError(f"{name_of(path)} is of type {type(target).__name__}, but a tensor was saved")
        tensor: Any = target
        entry = self._entries[index]
        dtype = check_kind(path, tensor)
        if (dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            saved = f"{entry.dtype} of shape {list(entry.shape)}"
            raise SnapshotError(f"{name_of(path)} is {dtype} of shape {list(tensor.shape)}, but {saved} was saved")
        self.targets[index] = tensor.detach()


def _has_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return any(map(_has_tensor, value)) if isinstance(value, (list, tuple)) else is_tensor(value)


def _fill(
    fd: int, entry: TensorEntry, target: Any, make_hasher: MakeHasher, room: tuple[HostMemory, HostMemory]
) -> Any:
    """Copy a tensor out of the segment, and compare what has arrived. Return the tensor, a new one without target."""
    import torch

    tensor = target
    if target is None:
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    is_direct = not tensor.is_cuda and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    landing = tensor if is_direct else _take(room[0], entry, tensor.dtype)
    memory, at = memory_of(landing), 0
    while at < entry.nbytes:
        count = os.preadv(fd, [memory[at : at + segment.BLOCK_BYTES]], entry.offset + at)
        if count == 0:
            raise SnapshotError(f"{name_of(entry.path)} is cut off")
        at += count
    if not is_direct:
        arrived = _take(room[1], entry, tensor.dtype)
        with torch.no_grad():
            tensor.copy_(landing)
            arrived.copy_(tensor)
        memory = memory_of(arrived)
    hasher = make_hasher()
    hasher.update(memory)
    segment.compare(entry, hasher.hexdigest())
    return tensor


def _take(room: HostMemory, entry: TensorEntry, dtype: Any) -> Any:
    room.begin(entry.nbytes)
    return room.take(entry.nbytes).view(dtype).reshape(entry.shape)


def _put(target: Any, saved: Any, tensors: list[Any]) -> Any:
    """Return what takes the place of a part of the caller's state: the same object, wherever it can be changed."""
    if isinstance(saved, TensorAt):
        return tensors[saved.index] if not is_tensor(target) else target
    if isinstance(saved, dict):
        into = target if isinstance(target, dict) else {}
        for key, item in saved.items():
            into[key] = _put(into.get(key), item, tensors)
        return into
    if isinstance(saved, (list, tuple)):
        is_same = isinstance(target, (list, tuple)) and len(target) == len(saved)
        items = [_put(target[at] if is_same else None, item, tensors) for at, item in enumerate(saved)]
        if type(target) is list and type(saved) is list:
            target[:] = items
            return target
        return type(saved)(items)
    return saved
