"""Calculation of timeouts from the records of all ranks: a collective, as in nvidia-resiliency-ext's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ft.learning.rule import calculate
from megatron_ft.learning.timeouts import OUT_OF_SECTION
from megatron_ft.rank.base import agreement


def calculate_over_ranks(
    ended_ns: Mapping[str, int],
    open_ns: Mapping[str, int],
    previous: Mapping[str, float | None],
    factor: float,
    *,
    leaves_out_open: bool = False,
) -> tuple[dict[str, float], list[str]]:
    """Return new timeouts by name, or those that no rank has observed an interval for yet: then there is no timeout.

    Values that are equal on all ranks decide if there is enough data. Only an interval that has ended makes a timeout
    ready. What goes on now counts in the value: a timeout below its age would end the rank the moment it takes force.

    Args:
        ended_ns: longest interval of this rank that has ended, negative without one, of sections and OUT_OF_SECTION.
        open_ns: age of what this rank has open now.
        previous: calculated timeouts to average with.
        factor: see ``calculate``.
        leaves_out_open: a section that no rank has closed, and that some rank has open, keeps its timeout.
    """
    longest_ns = [max(each, open_ns.get(name, -1)) for name, each in ended_ns.items()]
    maxima = max_over_ranks([each / 1e9 for each in [*ended_ns.values(), *longest_ns]])
    timeouts, missing = dict[str, float](), list[str]()
    for name, of_ended, of_all in zip(ended_ns, maxima[: len(ended_ns)], maxima[len(ended_ns) :], strict=True):
        if of_ended >= 0:
            timeouts[name] = calculate(of_all, previous.get(name), factor)
        elif not (leaves_out_open and of_all >= 0 and name != OUT_OF_SECTION):
            missing.append(name)
    return {} if missing else timeouts, missing


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
