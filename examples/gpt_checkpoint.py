"""Checkpoints of `train_gpt.py`: Megatron's layout on disk, by megatron-core's `dist_checkpointing`.

`<save>/iter_0000010/` holds the checkpoint after ten iterations; `<save>/latest_checkpointed_iteration.txt` names
the last *final* one. That file is replaced, whole, only after every rank has written its part, so a crash in the
middle of a save leaves the checkpoint before it in force, and the next save overwrites what the crash left.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

_TRACKER = "latest_checkpointed_iteration.txt"
# megatron-core 0.17 prefers another package's asynchronous writer to its own, which 0.16 always used.
_takes_writer = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
_OWN_WRITER = {"async_strategy": "mcore"} if _takes_writer else {}
# The persistent variant waits for CUDA; this one forks a writer for each save.
_async_calls = AsyncCallsQueue(persistent=False)


def save_checkpoint(iteration: int, model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace) -> None:
    """Save after `iteration` finished iterations, on all ranks.

    With `--async-save` the writing goes on in the background; `maybe_finalize_async_save` makes it final.
    """
    directory = _checkpoint_directory(args.save, iteration)
    if args.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _state_dict(model, optimizer, scheduler, args, is_loading=False)
    state["iteration"] = iteration
    state["consumed_train_samples"] = args.consumed_train_samples
    state["layout"] = _layout(args)
    request = dist_checkpointing.save(state, str(directory), async_sharded_save=args.async_save, **_OWN_WRITER)

    def make_final() -> None:
        if args.rank == 0:
            _write_tracker(args.save, iteration)
            print(f"  saved checkpoint at iteration {iteration:7d} to {args.save}", flush=True)
        # No rank goes on before the checkpoint is final: the iterations after it may count on it.
        torch.distributed.barrier()

    if request is None:
        make_final()
    else:
        request.add_finalize_fn(make_final)
        _async_calls.schedule_async_request(request)


def maybe_finalize_async_save(*, blocking: bool) -> None:
    """Make final what the background writers of all ranks have finished; a collective while a save is under way.

    With `blocking`, wait until all of them have.
    """
    _async_calls.maybe_finalize_async_calls(blocking=blocking)


def last_saved(args: argparse.Namespace) -> int | None:
    """The iteration of the last final checkpoint of `--load`, None if there is none yet. A collective.

    Rank 0's word counts for all: on a shared file system another node may still see the file before it.
    """
    found = [_read_tracker(args.load) if args.load and args.rank == 0 else None]
    torch.distributed.broadcast_object_list(found, src=0)
    return found[0]


def load_checkpoint(model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace) -> int | None:
    """Load the last final checkpoint of `--load`, on all ranks.

    Returns the number of iterations that it has seen, None if there is none yet. The position in the data goes to
    `args.consumed_train_samples`.
    """
    iteration = last_saved(args)
    if iteration is None:
        return None
    directory = str(_checkpoint_directory(args.load, iteration))
    saved_layout = dist_checkpointing.load_common_state_dict(directory)["layout"]
    same_layout = saved_layout == _layout(args)
    template = _state_dict(model, optimizer, scheduler, args, is_loading=True)
    if args.no_load_rng or not same_layout:
        del template["rng_state"]
    if not same_layout and args.rank == 0:
        print(
            f"  random states aren't restored: the checkpoint has the layout {saved_layout}, this run {_layout(args)}",
            flush=True,
        )
    state = dist_checkpointing.load(template, directory)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["opt_param_scheduler"])
    if "rng_state" in state:
        _set_rng_state(state["rng_state"])
    args.consumed_train_samples = state["consumed_train_samples"]
    assert state["iteration"] == iteration
    if args.rank == 0:
        print(f"  loaded checkpoint of iteration {iteration} from {args.load}", flush=True)
    return iteration


def _state_dict(
    model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace, *, is_loading: bool
) -> dict[str, Any]:
    model_state = model.module.sharded_state_dict()
    return {
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=is_loading),
        "opt_param_scheduler": scheduler.state_dict(),
        "rng_state": _sharded_rng_state(),
    }


def _layout(args: argparse.Namespace) -> dict[str, int]:
    """What has to be the same for random states, which belong to one rank each, to be worth restoring."""
    return {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "data": args.data_parallel_size,
    }


def _sharded_rng_state() -> ShardedObject:
    state = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )
    position = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return ShardedObject("rng_state", state, sizes, position)


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _checkpoint_directory(save: str, iteration: int) -> Path:
    return Path(save) / f"iter_{iteration:07d}"


def _read_tracker(load: str) -> int | None:
    try:
        return int((Path(load) / _TRACKER).read_text())
    except FileNotFoundError:
        return None


def _write_tracker(save: str, iteration: int) -> None:
    """Replace the tracker whole: a crash leaves the old or the new one, never half a number."""
    temporary = Path(save) / f".{_TRACKER}.tmp"
    with temporary.open("w") as file:
        file.write(f"{iteration}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(Path(save) / _TRACKER)
