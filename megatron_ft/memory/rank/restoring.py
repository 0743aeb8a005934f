"""Restores this rank's state from a verified segment, in place.

A segment that is damaged, or of another state, is a SnapshotError, one that can't be read an OSError.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection
from typing import Any

from megatron_ft.errors import LayoutError, SnapshotError
from megatron_ft.link.facts.launcher import RestoreFailed
from megatron_ft.link.log import ERROR, RANK
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.digests import Digest
from megatron_ft.memory.base.keeper_messages import Fetch, RankBegan
from megatron_ft.memory.base.threads import each_of
from megatron_ft.memory.rank import state_tree
from megatron_ft.memory.rank.copying import is_plain, memory_at, name_of_dtype, plain, threads, why_unfit
from megatron_ft.memory.rank.keeper_connection import KeeperConnection, Place
from megatron_ft.memory.rank.state_tree import is_tensor
from megatron_ft.memory.rules.lines import restore_failed
from megatron_ft.memory.rules.segment_layout import Layout, Path, TensorEntry, name_of
from megatron_ft.memory.rules.snapshots import SnapshotKey

_FETCH_S = 600.0
_TOLD_S = 30.0

has_restored = False
"""This process has the state of the snapshot that was chosen for its cycle."""


def restore(place: Place, key: SnapshotKey, state: object, newer_than: int | None = None) -> None:
    """Give ``state`` the content of the snapshot.

    The launcher is told of a failure before it is raised: whatever the script does then, its cycle is over. If it can't
    be told, the process ends: its script would go on with another state than the other ranks.

    Raises:
        SnapshotError: this rank can't have that state.
    """
    global has_restored
    began_s = time.monotonic()
    connection = KeeperConnection(place)
    try:
        if place.digest is None:
            raise SnapshotError("xxhash isn't installed for this rank, or can't be loaded")
        if not isinstance(state, dict):
            raise SnapshotError(f"a state is a dict, not of type {type(state).__name__}")
        fill_from(_fetch(connection, key), place, key, state)
        connection.tell(RankBegan(key, time.monotonic() - began_s, newer_than))
        has_restored = True
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:1000]
        failed = RestoreFailed(rank=place.info.global_rank, cycle=place.info.cycle, key=key, text=text)
        try:
            connection.close()  # an answer may be on its way
            connection.open()
            connection.ask(failed, _TOLD_S)
        except SnapshotError as untold:
            text = restore_failed(failed.rank, key.iteration, text)
            RANK.say(ERROR, f"ERROR: {text}; the rank ends, as its launcher can't be told: {untold}")
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                    stream.flush()
            os._exit(1)
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


def read(place: Place, key: SnapshotKey, names: Collection[str] | None = None) -> dict[str | int, Any]:
    """Return the state of a snapshot, or its parts of these names. The launcher isn't told."""
    state: dict[str | int, Any] = {}
    with contextlib.closing(KeeperConnection(place)) as connection:
        fill_from(_fetch(connection, key), place, key, state, names)
    return state


def _fetch(connection: KeeperConnection, key: SnapshotKey) -> int:
    connection.open()
    return connection.ask(Fetch(key), _FETCH_S, fds=1)[1]


def fill_from(
    fd: int, place: Place, key: SnapshotKey, state: dict[str | int, Any], names: Collection[str] | None = None
) -> None:
    """Give ``state`` the content of a segment, and close it. Digests are compared as tensors are copied.

    ``names``: of the parts of the state that are wanted; None: all.
    """
    assert place.digest is not None
    digest = place.digest
    try:
        layout = segment.read_layout(fd, digest)
        if why := layout.why_not(key, place.info.global_rank, place.info.world_size):
            raise SnapshotError(f"the segment isn't this rank's: {why}")
        if type(layout.tree) is not dict:
            raise LayoutError("the layout has no state")
        tree = layout.tree if names is None else {name: layout.tree[name] for name in names if name in layout.tree}
        tensors: dict[int, Any] = {}

        def put_tensor(target: Any, number: int, path: Path) -> Any:
            if number in tensors or not 0 <= number < len(layout.tensors):
                raise LayoutError(f"{name_of(path)} is another tensor than was saved")
            tensors[number] = _target(target, layout.tensors[number], path)
            return tensors[number]

        state_tree.put(state, tree, put_tensor)
        if names is None and len(tensors) != len(layout.tensors):
            raise LayoutError("the layout lists other tensors than its state has")
        each_of([*tensors], lambda at: _fill(fd, layout, at, tensors[at], digest), threads())
    finally:
        os.close(fd)


def _target(target: Any, entry: TensorEntry, path: Path) -> Any:
    """Return the tensor that is filled: the caller's, or a new one."""
    import torch

    if target is None:
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    if not is_tensor(target):
        raise SnapshotError(f"{name_of(path)} is of type {type(target).__name__}, but a tensor was saved")
    if why := why_unfit(target):
        raise SnapshotError(f"{name_of(path)} {why}")
    dtype = name_of_dtype(target.dtype)
    if (dtype, tuple(target.shape)) != (entry.dtype, entry.shape):
        saved = f"{entry.dtype} of shape {list(entry.shape)}"
        raise SnapshotError(f"{name_of(path)} is {dtype} of shape {list(target.shape)}, but {saved} was saved")
    return target


def _fill(fd: int, layout: Layout, at: int, tensor: Any, digest: Digest) -> None:
    """Copy a tensor out of the segment, and compare its digest with that of what has arrived."""
    import torch

    entry, into = layout.tensors[at], tensor
    if not is_plain(tensor):
        into = torch.empty(entry.shape, dtype=tensor.dtype)
    segment.verify(fd, layout, at, memory_at(into.data_ptr(), entry.nbytes), digest)
    if into is not tensor:
        with torch.no_grad():
            _widest(tensor.detach()).copy_(_widest(into, tensor))
        arrived = plain(tensor.cpu())
        if digest([memory_at(arrived.data_ptr(), entry.nbytes)]) != entry.digest:
            raise SnapshotError(f"{layout.name_of(at)} isn't what was restored: its digest is another one")


def _widest(tensor: Any, like: Any = None) -> Any:
    """Return the part of a tensor in which no two elements share memory, or those in ``like`` do."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
