"""Calculation of timeouts from the records of all ranks: a collective of the reference's API."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.core.timeouts.in_force import SectionTimeouts
from megatron_ft.core.timeouts.over_all_ranks import NO_OBSERVATION, NotReady, Rule, calculate_sections
from megatron_ft.rank.base import agreement
from megatron_ft.rank.client.recorder import Recorder


def seconds(ns: int) -> float:
    """Return nanoseconds as seconds; a negative number means that nothing was observed."""
    return ns / 1e9 if ns >= 0 else NO_OBSERVATION


def section_timeouts(
    recorder: Recorder, timeouts: SectionTimeouts, names: Sequence[str], rule: Rule, *, leaves_out_open: bool = False
) -> SectionTimeouts | NotReady:
    """Calculate the timeouts of these sections; OUT_OF_SECTION may be among them. A collective.

    ``leaves_out_open`` as for ``calculate_sections``.
    """
    longest = recorder.observed()
    observed = {name: seconds(longest[name]) for name in names}
    open_ages = {name: seconds(age) for name, age in recorder.open_ages().items()}
    result = calculate_sections(observed, timeouts, rule, max_over_ranks, open_ages, leaves_out_open=leaves_out_open)
    return result if isinstance(result, NotReady) else result[0]


def max_over_ranks(values: Sequence[float]) -> tuple[list[float], list[int]]:
    """Return the maximum of each value over all ranks, and the lowest rank that has it.

    Runs two all_reduce of ``len(values)`` doubles on the default process group, on its backend's device. Without an
    initialised process group, returns the values themselves and rank 0.
    """
    if not values or not agreement.has_process_group():
        return list(values), [0] * len(values)
    import torch
    import torch.distributed as dist

    device = _device_of_backend(str(dist.get_backend_config()))
    own = torch.tensor(list(values), dtype=torch.float64, device=device)
    maxima = own.clone()
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    world = dist.get_world_size()
    ranks = torch.where(own == maxima, float(dist.get_rank()), float(world))
    dist.all_reduce(ranks, op=dist.ReduceOp.MIN)
    return [float(v) for v in maxima.tolist()], [int(r) for r in ranks.tolist()]


def _device_of_backend(config: str) -> str:
    """Return the device of tensors for a backend such as ``cpu:gloo,cuda:nccl`` or ``nccl``: the CPU if possible."""
    import torch

    backends = {device: name for device, _, name in (part.rpartition(":") for part in config.lower().split(","))}
    if "cpu" in backends or any(name in ("gloo", "mpi", "fake") for name in backends.values()):
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, config
    return str(accelerator.type)
