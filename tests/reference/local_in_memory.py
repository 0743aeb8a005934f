"""``pytest -p local_in_memory``: what tests of nvidia-resiliency-ext's local checkpoints need, without GPU and files.

* CUDA is the CPU, and NCCL is gloo.
* A checkpoint's file is an object that is there as long as the manager has the checkpoint in memory; who removes it has
  the manager lose the checkpoint.
* Only rank 0 writes the report.
"""

from __future__ import annotations

import os
from typing import Any

import nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager as served
import pytest
import torch
import torch.distributed as dist

from megatron_ft.integrations.local_checkpoints import LocalCheckpointManager

_lost: set[tuple[Any, ...]] = set()


class InMemory:
    """In place of the path of a checkpoint's file."""

    def __init__(self, manager: Any, ckpt_id: tuple[int, int, Any]) -> None:
        self._manager, self.ckpt_id = manager, ckpt_id

    def exists(self) -> bool:
        return self.ckpt_id in self._manager._my_ckpt_ids()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: Any) -> None:
    if os.environ["RANK"] != "0":
        config.option.xmlpath = None


def _use_cpu() -> None:
    def on_cpu(function: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            if "device" in options:
                options["device"] = "cpu"
            return function(*("cpu" if isinstance(each, str) and each == "cuda" else each for each in args), **options)

        return called

    cuda, init = torch.cuda, dist.init_process_group
    torch.empty = on_cpu(torch.empty)
    torch.Tensor.to = on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    cuda.device_count = lambda: 2
    cuda.set_device = lambda *_: None
    dist.init_process_group = lambda **options: init(**{**options, "backend": "gloo"})


def _use_memory() -> None:
    ids, save, remove = LocalCheckpointManager._my_ckpt_ids, LocalCheckpointManager.save, os.remove

    def save_again(manager: Any, state_dict: Any, iteration: int, is_async: bool = False) -> Any:
        _lost.discard(manager._ckpt_id(iteration))
        return save(manager, state_dict, iteration, is_async)

    def remove_either(path: Any) -> None:
        if isinstance(path, InMemory):
            _lost.add(path.ckpt_id)
        else:
            remove(path)

    manager: Any = LocalCheckpointManager
    manager._my_ckpt_ids = lambda self: [each for each in ids(self) if each not in _lost]
    manager.save = save_again
    manager._local_ckpt_path_from_id = lambda self, ckpt_id: InMemory(self, ckpt_id)
    manager._filename_from_template = lambda _, iteration, rank, suffix: f"iter_{iteration:07d}_{rank}_local{suffix}.pt"
    os.remove = remove_either


_use_cpu()
_use_memory()
assert served.LocalCheckpointManager is LocalCheckpointManager
