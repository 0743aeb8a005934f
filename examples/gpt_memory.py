"""Memory checkpoints of `train_gpt.py`: the state that a file checkpoint has, as a plain dict."""

from __future__ import annotations

import argparse
import random
from typing import Any

import numpy
import torch
from gpt_checkpoint import last_saved
from megatron.core import tensor_parallel

from megatron_ft import memory_checkpoint


def save_in_memory(iteration: int, model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace) -> None:
    """Keep the state after `iteration` finished iterations, if that is a multiple of the interval."""
    every = args.memory_checkpoint_interval
    if every and iteration % every == 0:
        memory_checkpoint.save(iteration, _state(model, optimizer, scheduler, args), every=every)


def restore_from_memory(model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace) -> int | None:
    """Go on from memory, if something newer than the last checkpoint on disk is there; else return None."""
    if not args.memory_checkpoint_interval:
        return None
    state = _state(model, optimizer, scheduler, args)
    iteration = memory_checkpoint.restore(state, newer_than=last_saved(args))
    if iteration is None:
        return None
    # the weights are restored in place; optimizer and scheduler have made copies of their numbers
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    args.consumed_train_samples = state["consumed_train_samples"]
    _set_random_states(state["random"])
    return iteration


def _state(model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "parameters": dict(model.module.named_parameters()),
        "buffers": dict(model.module.named_buffers()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "consumed_train_samples": args.consumed_train_samples,
        "random": _random_states(),
    }


def _random_states() -> dict[str, Any]:
    algorithm, keys, *rest = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (algorithm, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }


def _set_random_states(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
