"""Restores this rank's state from a verified segment, in place."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_ft.core.errors import LayoutError, SnapshotError
from megatron_ft.core.facts.launcher import RestoreFailed
from megatron_ft.ipc.log import ERROR, RANK
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.digests import MakeHasher
from megatron_ft.memory.base.keeper_messages import Fetch, RankBegan, Segment
from megatron_ft.memory.rank import state_tree
from megatron_ft.memory.rank.copying import Mapping, each_of, memory_at, name_of_dtype, pieces, why_unfit
from megatron_ft.memory.rank.keeper_connection import KeeperConnection, Place, RefusedError
from megatron_ft.memory.rank.state_tree import is_tensor
from megatron_ft.memory.rules.segment_layout import Layout, Path, TensorEntry, name_of
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, SnapshotKey

_FETCH_S = 600.0
_TOLD_S = 30.0

_restored = False


def has_restored() -> bool:
    """Return True if this process has the state of the snapshot that was chosen for its cycle."""
    return _restored


def restore(
    place: Place, key: SnapshotKey, state: object, make_hasher: MakeHasher | None, newer_than: int | None = None
) -> None:
    """Give ``state`` the content of the snapshot. Without ``make_hasher`` this fails.

    The launcher is told of a failure before it is raised: whatever the script does then, its cycle is over. If it can't
    be told, the process ends: its script would go on with another state than the other ranks.

    Raises:
        SnapshotError: this rank can't have that state.
    """
    global _restored
    began_s = time.monotonic()
    connection = KeeperConnection(place)
    try:
        if make_hasher is None:
            raise SnapshotError("xxhash isn't installed for this rank, or can't be loaded")
        if not isinstance(state, dict):
            raise SnapshotError(f"a state is a dict, not of type {type(state).__name__}")
        fill_from(_fetch(connection, key), place, key, state, make_hasher)
        connection.tell(RankBegan(key, time.monotonic() - began_s, newer_than))
        _restored = True
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


def begin_without(place: Place, key: SnapshotKey, newer_than: int) -> None:
    """Tell the launcher that this rank goes on from the checkpoint on disk: either all ranks restore, or none."""
    # a keeper that doesn't answer has lost the snapshot, and no rank of this node restores it
    with contextlib.closing(KeeperConnection(place)) as connection, contextlib.suppress(SnapshotError):
        connection.open()
        connection.tell(RankBegan(key, None, newer_than))


def read(place: Place, key: SnapshotKey, make_hasher: MakeHasher) -> dict[str | int, Any]:
    """Return the state of a snapshot, with its tensors on the CPU. The launcher isn't told.

    Raises:
        SnapshotError: it can't be had.
        OSError: it can't be read.
    """
    state: dict[str | int, Any] = {}
    with contextlib.closing(KeeperConnection(place)) as connection:
        fill_from(_fetch(connection, key), place, key, state, make_hasher)
    return state


class Peek(NamedTuple):
    """Part of a snapshot's state. ``tree``: as in its layout."""

    tree: Any
    tensor: Any
    pickle_key: str


def peek(place: Place, key: SnapshotKey, make_hasher: MakeHasher, name: str) -> Peek:
    """Return the tree of a snapshot, and its tensor of that name, None if it has none. The launcher isn't told.

    Raises:
        SnapshotError: it can't be had.
        OSError: it can't be read.
    """
    with (
        contextlib.closing(KeeperConnection(place)) as connection,
        _mapped(_fetch(connection, key), place, key, make_hasher) as (mapping, layout),
    ):
        at = layout.tree.get(name)
        is_there = type(at) is list and at[0] == state_tree.TENSOR
        tensor = _fill(mapping, layout, at[1], None, make_hasher) if is_there else None
        return Peek(layout.tree, tensor, connection.pickle_key)


def _fetch(connection: KeeperConnection, key: SnapshotKey) -> int:
    connection.open()
    return connection.ask(Fetch(key), Segment, _FETCH_S)[1]


def _tell(connection: KeeperConnection, failed: RestoreFailed) -> None:
    """Return once the keeper has told the launcher: it reads in order, so that its answer comes after that.

    Raises:
        SnapshotError: it doesn't answer.
    """
    connection.close()  # an answer may be on its way
    connection.open()
    connection.tell(failed)
    with contextlib.suppress(RefusedError):  # that's an answer, too
        os.close(connection.ask(Fetch(failed.key), Segment, _TOLD_S)[1])


def _end_rank(failed: RestoreFailed, untold: SnapshotError) -> None:
    text = f"rank {failed.rank} can't restore iteration {failed.key.iteration} from memory: {failed.text}"
    RANK.say(ERROR, f"ERROR: {text}; the rank ends, as its launcher can't be told: {untold}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(1)


@contextlib.contextmanager
def _mapped(fd: int, place: Place, key: SnapshotKey, make_hasher: MakeHasher) -> Iterator[tuple[Mapping, Layout]]:
    """Map a segment, which is closed then, and check its layout and tree.

    Raises:
        SnapshotError: it is damaged, or isn't the one of this rank and key.
        OSError: it can't be read.
    """
    try:
        layout = segment.read_layout(fd, make_hasher)
        found = layout.key if key.cycle != EARLIER_LIFE else SnapshotKey(EARLIER_LIFE, 0, layout.key.iteration)
        if (found, layout.rank, layout.world) != (key, place.info.global_rank, place.info.world_size):
            of = f"rank {layout.rank} of {layout.world}, iteration {layout.key.iteration}"
            raise SnapshotError(f"the segment is of {of}")
        state_tree.check(layout.tree, len(layout.tensors))
        mapping = Mapping(fd, sum(each.nbytes for each in layout.tensors), writes=False)
        try:
            yield mapping, layout
        finally:
            mapping.close()
    finally:
        os.close(fd)


def fill_from(fd: int, place: Place, key: SnapshotKey, state: dict[str | int, Any], make_hasher: MakeHasher) -> None:
    """Give ``state`` the content of a segment, and close it. No tensor is changed before all digests are compared.

    Raises:
        SnapshotError: the segment is damaged, or is of another state.
        OSError: it can't be read.
    """
    with _mapped(fd, place, key, make_hasher) as (mapping, layout):
        targets: dict[int, Any] = {}
        _match(state, layout.tree, (), layout, targets)
        numbers = range(len(layout.tensors))
        found = each_of(numbers, lambda at: _digest(mapping, layout.tensors[at], make_hasher))
        for at, digest in enumerate(found):
            if digest != layout.tensors[at].digest:
                raise LayoutError(f"{layout.name_of(at)} has changed: its digest is another one")
        tensors = each_of(numbers, lambda at: _fill(mapping, layout, at, targets.get(at), make_hasher))
        _put(state, layout.tree, tensors)


def _digest(mapping: Mapping, entry: TensorEntry, make_hasher: MakeHasher) -> bytes:
    return _digest_of(mapping.bytes(entry.offset, entry.nbytes), make_hasher)


def _digest_of(memory: memoryview, make_hasher: MakeHasher) -> bytes:
    hasher = make_hasher()
    hasher.update(memory)
    found: bytes = hasher.digest()
    return found


def _match(target: Any, node: Any, path: Path, layout: Layout, targets: dict[int, Any]) -> None:
    """Compare a part of the caller's state with what was saved of it, and collect the tensors that are overwritten.

    Raises:
        SnapshotError: they don't fit together.
    """
    is_list = type(node) is list
    if is_list and node[0] == state_tree.TENSOR:
        if target is not None:  # else it is created
            targets[node[1]] = _matched(target, layout.tensors[node[1]], path)
    elif is_tensor(target):
        saved = type(node).__name__ if not is_list else node[0]
        raise SnapshotError(f"{name_of(path)} is a tensor, but {saved} was saved")
    elif type(node) is dict and isinstance(target, dict):
        missing = [key for key in target if key not in node]
        if missing:
            raise SnapshotError(f"{name_of((*path, missing[0]))} was not saved")
        for key, item in node.items():
            if key in target:
                _match(target[key], item, (*path, key), layout, targets)
    elif is_list and isinstance(target, (list, tuple)) and type(node[-1]) is list and len(node[-1]) == len(target):
        for at, item in enumerate(node[-1]):
            if type(item) in (dict, list) or is_tensor(target[at]):
                _match(target[at], item, (*path, at), layout, targets)
    elif _has_tensor(target):
        raise SnapshotError(f"{name_of(path)} has another structure than what was saved")


def _matched(target: Any, entry: TensorEntry, path: Path) -> Any:
    if not is_tensor(target):
        raise SnapshotError(f"{name_of(path)} is of type {type(target).__name__}, but a tensor was saved")
    if why := why_unfit(target):
        raise SnapshotError(f"{name_of(path)} {why}")
    dtype = name_of_dtype(target.dtype)
    if (dtype, tuple(target.shape)) != (entry.dtype, entry.shape):
        saved = f"{entry.dtype} of shape {list(entry.shape)}"
        raise SnapshotError(f"{name_of(path)} is {dtype} of shape {list(target.shape)}, but {saved} was saved")
    return target.detach()


def _has_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return any(map(_has_tensor, value)) if isinstance(value, (list, tuple)) else is_tensor(value)


def _fill(mapping: Mapping, layout: Layout, at: int, target: Any, make_hasher: MakeHasher) -> Any:
    """Copy a tensor out of the segment, and compare what has arrived. Return the tensor, a new one without target.

    Raises:
        SnapshotError: something else has arrived.
    """
    import torch

    entry = layout.tensors[at]
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) if target is None else target
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        copy_out(mapping, entry, tensor.data_ptr())
        arrived = tensor
    else:
        landing = torch.empty(entry.shape, dtype=tensor.dtype)
        copy_out(mapping, entry, landing.data_ptr())
        with torch.no_grad():
            _widest(tensor).copy_(_widest(landing, tensor))
            arrived = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    if _digest_of(memory_at(arrived.data_ptr(), entry.nbytes), make_hasher) != entry.digest:
        raise SnapshotError(f"{layout.name_of(at)} isn't what was restored: its digest is another one")
    return tensor


def copy_out(mapping: Mapping, entry: TensorEntry, address: int) -> None:
    for each in pieces(address, mapping.address + entry.offset, entry.nbytes):
        ctypes.memmove(*each)


def _widest(tensor: Any, like: Any = None) -> Any:
    """Return the part of a tensor in which no two elements share memory, or those in ``like`` do."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _put(target: Any, node: Any, tensors: list[Any]) -> Any:
    """Return what takes the place of a part of the caller's state: the same object, wherever it can be changed."""
    if type(node) is dict:
        into = target if isinstance(target, dict) else {}
        for key, item in node.items():
            into[key] = _put(into.get(key), item, tensors)
        return into
    if type(node) is not list:
        return node
    if node[0] == state_tree.TENSOR:
        return target if is_tensor(target) else tensors[node[1]]
    if node[0] in ("list", "tuple", "namedtuple"):
        held = node[-1]
        is_same = isinstance(target, (list, tuple)) and len(target) == len(held)
        items = [
            _put(target[at] if is_same else None, item, tensors) if type(item) in (dict, list) else item
            for at, item in enumerate(held)
        ]
        if type(target) is list and node[0] == "list":
            target[:] = items
            return target
        return state_tree.plain(node, items)
    return state_tree.plain(node)
