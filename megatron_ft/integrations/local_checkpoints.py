"""Local checkpoints of Megatron-LM, Megatron-Bridge and Lightning, kept in the nodes' memory instead of files.

Names, arguments and results are those of ``nvidia_resiliency_ext.checkpointing.local``. ``save`` of
`LocalCheckpointManager` returns while a thread copies, and runs no collective: the coordinator finds out which
iteration all ranks have. ``find_latest`` gathers the iterations of all ranks, as its callers expect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ft.errors import SnapshotError
from megatron_ft.integrations.replication import GroupWrapper, ReplicationStrategy
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


class CheckpointingException(Exception):
    """Base of errors of local checkpoints."""


class SameMachineReplicationException(CheckpointingException):
    """Raised if a checkpoint is there already."""

    def __init__(self, ckpt_id: CkptID) -> None:
        super().__init__(f"checkpoint {ckpt_id!r} is on this machine already")


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
        """Save now; all ranks wait for each other, as in the asynchronous case."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        if dist.is_initialized():
            dist.barrier()
        for fn in self.finalize_fns:
            fn()


class BaseCheckpointManager(ABC):
    """Base of a manager that keeps its checkpoints where its methods say. All ranks make the same calls."""

    def __init__(self, session_id: Any, repl_strategy: ReplicationStrategy | None = None) -> None:
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.latest_iteration = -1
        """Result of ``find_latest``, -1 after a save."""

    @property
    def rank(self) -> int:
        return agreement.rank()

    @abstractmethod
    def _my_ckpt_ids(self) -> Iterable[CkptID]:
        """Return the checkpoints that this rank can load."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        """Load a checkpoint.

        Raises:
            CheckpointingException: it can't be loaded.
        """

    @abstractmethod
    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        """Save a checkpoint.

        Raises:
            SameMachineReplicationException: there is one already.
        """

    def _cleanup(self, iteration: int) -> None:  # noqa: B027 - a manager may have nothing to remove
        """Remove checkpoints older than the one that was saved."""

    def _cleanup_failed_save(self, iteration: int) -> None:  # noqa: B027
        """Remove what is left of a checkpoint that a rank couldn't save."""

    def find_latest(self) -> int:
        """Return the newest iteration that all ranks can load, -1 for none. A collective if none is known yet."""
        global _is_loaded
        _is_loaded = False
        if self.latest_iteration == -1:
            mine = {iteration for iteration, rank, _ in self._my_ckpt_ids() if rank == self.rank}
            everyones = GroupWrapper().all_gather_object(mine)
            self.latest_iteration = max(set.intersection(*everyones), default=-1)
        return self.latest_iteration

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """Return the checkpoint that ``find_latest`` has found, on its devices, and its ID.

        Raises:
            CheckpointingException: none was found, or it can't be loaded.
        """
        global _is_loaded
        if self.latest_iteration == -1:
            raise CheckpointingException("find_latest() comes first, and there is nothing to load if it returns -1")
        ckpt_id = self._ckpt_id(self.latest_iteration)
        state_dict = self._load(ckpt_id)
        state_dict.restore_tensor_device(non_blocking=False)
        _is_loaded = True
        return state_dict, ckpt_id

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Save, or return the request to do so. The tensors of ``state_dict`` are on the CPU afterwards.

        Raises:
            CheckpointingException: not all ranks have saved; with a request, its last function raises that.
        """
        self._begin(iteration)
        if self.repl_strategy is not None:
            raise CheckpointingException("only a LocalCheckpointManager has replicas")
        ckpt_id = self._ckpt_id(iteration)
        state_dict.copy_tensors_to_cpu(non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        request = AsyncRequest(self._save, (state_dict, ckpt_id), [lambda: self._finish(iteration)])
        if is_async:
            return request
        request.execute_sync()
        return None

    def _begin(self, iteration: int) -> None:
        newest = self.latest_iteration
        assert newest < iteration, f"iteration {iteration} isn't newer than {newest}, which was found"
        self.latest_iteration = -1

    def _ckpt_id(self, iteration: int) -> CkptID:
        if iteration < 0:
            raise CheckpointingException(f"iteration {iteration} is negative")
        return iteration, self.rank, self.session_id

    def _finish(self, iteration: int) -> None:
        newest, self.latest_iteration = self.find_latest(), -1
        if newest < iteration:
            self._cleanup_failed_save(iteration)
            raise CheckpointingException(f"iteration {iteration} isn't saved: the newest of all ranks is {newest}")
        self._cleanup(iteration)


class LocalCheckpointManager(BaseCheckpointManager):
    """Manager of checkpoints in memory. Keepers free older ones, and what a rank couldn't save."""

    def __init__(
        self,
        root_local_ckpt_dir: str | Path | None,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
    ) -> None:
        """``root_local_ckpt_dir``: no directory is made, but a manager of another one finds other checkpoints."""
        super().__init__(session_id, repl_strategy)
        self.root_local_ckpt_dir = root_local_ckpt_dir
        self._label = f"local checkpoint {root_local_ckpt_dir} {session_id}"
        self._keys: dict[int, SnapshotKey] = {}
        place = usable_place()
        if place is not None and place.info.cycle == 0:
            copies = "" if repl_strategy is None else "; the keepers make the copies, not the groups asked for here"
            say.note(f"local checkpoints are kept in the nodes' memory, not in files{copies}")

    @property
    def local_ckpt_dir(self) -> Path:
        """Directory that nvidia-resiliency-ext would use; scripts print it."""
        return Path(self.root_local_ckpt_dir or ".") / str(self.session_id) / str(self.rank)

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> AsyncRequest | None:
        """Begin to save, and return a request that has nothing to do. ``state_dict`` stays as it is.

        Raises:
            CheckpointingException: the state can't be kept.
        """
        self._begin(iteration)
        self._save(state_dict, self._ckpt_id(iteration))
        return AsyncRequest(None, (), []) if is_async else None

    def _my_ckpt_ids(self) -> list[CkptID]:
        self._keys = objects.available(self._label)
        return [self._ckpt_id(iteration) for iteration in self._keys]

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        try:
            found: TensorAwareStateDict = objects.load(self._keys[ckpt_id[0]], self._label)
        except (SnapshotError, OSError, KeyError) as error:
            raise CheckpointingException(f"iteration {ckpt_id[0]} can't be loaded from memory: {error}") from error
        return found

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        try:
            objects.save(ckpt_id[0], state_dict, self._label)
        except SnapshotError as error:
            raise CheckpointingException(str(error)) from error
