"""Calculation of timeouts from the records of all ranks: a collective of the reference's API."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.learning.rule import NO_OBSERVATION
from megatron_ft.rank.base import agreement


def seconds(ns: int) -> float:
    """Return nanoseconds as seconds; a negative number means that nothing was observed."""
    return ns / 1e9 if ns >= 0 else NO_OBSERVATION


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over all ranks.

    Runs one all_reduce of ``len(values)`` doubles on the default process group, on its backend's device. Without an
    initialised process group, returns the values themselves.
    """
    if not values or not agreement.has_process_group():
        return list(values)
    import torch
    import torch.distributed as dist

    device = _device_of_backend(str(dist.get_backend_config()))
    maxima = torch.tensor(list(values), dtype=torch.float64, device=device)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return [float(v) for v in maxima.tolist()]


def _device_of_backend(config: str) -> str:
    """Return the device of tensors for a backend such as ``cpu:gloo,cuda:nccl`` or ``nccl``: the CPU if possible."""
    import torch

    backends = {device: name for device, _, name in (part.rpartition(":") for part in config.lower().split(","))}
    if "cpu" in backends or any(name in ("gloo", "mpi", "fake") for name in backends.values()):
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, config
    return str(accelerator.type)
