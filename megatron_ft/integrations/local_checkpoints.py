"""Local checkpoints of Megatron-LM, Megatron-Bridge and Lightning, kept in the nodes' memory instead of files.

Names, arguments and results are those of ``nvidia_resiliency_ext.checkpointing.local``. ``save`` of
`LocalCheckpointManager` returns while a thread copies, and runs no collective: the coordinator finds out which
iteration all ranks have. ``find_latest`` gathers the iterations of all ranks, as its callers expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_ft.errors import SnapshotError
from megatron_ft.integrations.replication import ReplicationStrategy
from megatron_ft.integrations.tensor_aware import TensorAwareStateDict
from megatron_ft.memory.rank import objects
from megatron_ft.memory.rank.keeper_connection import usable_place
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.rank.base import agreement, say

CkptID = tuple[int, int, Any]
"""Iteration, rank and session."""


_is_loaded = False


def is_loaded() -> bool:
    """Return True if the last search of this process for a local checkpoint has ended with the load of one."""
    return _is_loaded


def newest_of_all_ranks(mine: Iterable[int]) -> int:
    """Return the newest iteration that all ranks have, -1 for none. A collective."""
    everyones = [set(mine)]
    if dist.is_initialized():
        everyones *= dist.get_world_size()
        dist.all_gather_object(everyones, everyones[0])
    return max(set.intersection(*everyones), default=-1)


class CheckpointingException(Exception):
    """Base of errors of local checkpoints."""


class AsyncRequest(NamedTuple):
    """Save for a queue of asynchronous calls: Megatron-LM's own and nvidia-resiliency-ext's know it by its fields."""

    async_fn: Callable[..., None] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], None]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Add a function to call once all ranks have saved."""
        if self.is_frozen:
            raise RuntimeError("the request is frozen")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the same request, to which no function can be added."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Wait for all ranks, as in the asynchronous case, and call the functions."""
        if dist.is_initialized():
            dist.barrier()
        for fn in self.finalize_fns:
            fn()


class LocalCheckpointManager:
    """Manager of checkpoints in memory. All ranks make the same calls.

    Keepers free older checkpoints, and what a rank couldn't save.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | Path | None,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
    ) -> None:
        """``root_local_ckpt_dir``: no directory is made, but a manager of another one finds other checkpoints."""
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.root_local_ckpt_dir = root_local_ckpt_dir
        self.latest_iteration = -1
        """Result of ``find_latest``, -1 after a save."""
        self._label = f"local checkpoint {root_local_ckpt_dir} {session_id}"
        self._keys: dict[int, SnapshotKey] = {}
        place = usable_place()
        if place is not None and place.info.cycle == 0:
            copies = "" if repl_strategy is None else "; the keepers make the copies, not the groups asked for here"
            say.note(f"local checkpoints are kept in the nodes' memory, not in files{copies}")

    @property
    def local_ckpt_dir(self) -> Path:
        """Directory that nvidia-resiliency-ext would use; scripts print it."""
        return Path(self.root_local_ckpt_dir or ".") / str(self.session_id) / str(agreement.rank())

    def find_latest(self) -> int:
        """Return the newest iteration that all ranks can load, -1 for none. A collective if none is known yet."""
        global _is_loaded
        _is_loaded = False
        if self.latest_iteration == -1:
            self.latest_iteration = newest_of_all_ranks(iteration for iteration, _, _ in self._my_ckpt_ids())
        return self.latest_iteration

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """Return the checkpoint that ``find_latest`` has found, on its devices, and its ID.

        Raises:
            CheckpointingException: none was found, or it can't be loaded.
        """
        global _is_loaded
        iteration = self.latest_iteration
        if iteration == -1:
            raise CheckpointingException("find_latest() comes first, and there is nothing to load if it returns -1")
        try:
            state_dict: TensorAwareStateDict = objects.load(self._keys[iteration], self._label)
        except (SnapshotError, OSError, KeyError) as error:
            raise CheckpointingException(f"iteration {iteration} can't be loaded from memory: {error}") from error
        state_dict.restore_tensor_device(non_blocking=False)
        _is_loaded = True
        return state_dict, self._ckpt_id(iteration)

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Begin to save, and return a request that has nothing to do. ``state_dict`` stays as it is.

        Raises:
            CheckpointingException: the state can't be kept.
        """
        newest = self.latest_iteration
        assert newest < iteration, f"iteration {iteration} isn't newer than {newest}, which was found"
        self.latest_iteration = -1
        try:
            objects.save(iteration, state_dict, self._label)
        except SnapshotError as error:
            raise CheckpointingException(str(error)) from error
        return AsyncRequest(None, (), []) if is_async else None

    def _my_ckpt_ids(self) -> list[CkptID]:
        self._keys = objects.available(self._label)
        return [self._ckpt_id(iteration) for iteration in self._keys]

    def _ckpt_id(self, iteration: int) -> CkptID:
        return iteration, agreement.rank(), self.session_id
