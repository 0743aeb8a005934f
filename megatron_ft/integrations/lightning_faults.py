"""Simulated faults of the Lightning callbacks: one rank fails after a delay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.errors import ConfigError, nearest, show
from megatron_ft.core.fault_plan import RANDOM, RANDOM_TYPES
from megatron_ft.rank.base import agreement
from megatron_ft.rank.faults import simulated
from megatron_ft.rank.faults.simulated import SimulatedFault

__all__ = ["SimulatedFaultParams", "parse", "plan", "start"]


@dataclass
class SimulatedFaultParams:
    """A fault that one rank simulates, for tests and rehearsals, in every cycle anew.

    Raises:
        ConfigError: a value is invalid (a ValueError).
    """

    fault_type: str
    """"rank_killed" (SIGKILL), "rank_hung" (SIGSTOP), or "random": one of the two."""
    base_delay: float
    """Least delay in seconds from the start of the fit."""
    rand_delay: float = 0.0
    """Most seconds added at random."""
    rank_to_fail: int | None = None
    """Rank that fails; None for a random one."""

    def __post_init__(self) -> None:
        known = [*RANDOM_TYPES, RANDOM]
        if self.fault_type not in known:
            raise ConfigError(
                f"fault_type must be one of {', '.join(known)}, not {show(self.fault_type)}"
                f"{nearest(str(self.fault_type), known)}"
            )
        for name in ("base_delay", "rand_delay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be a number of seconds from 0, not {show(value)}")
        rank = self.rank_to_fail
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
            raise ConfigError(f"rank_to_fail must be a rank or None, not {show(rank)}")


def parse(value: SimulatedFaultParams | Mapping[str, Any] | None) -> SimulatedFaultParams | None:
    """Convert the parameters of a constructor: the object, or a mapping of its fields.

    Raises:
        ConfigError: the value is neither, or a field is invalid.
    """
    if value is None or isinstance(value, SimulatedFaultParams):
        return value
    try:
        return SimulatedFaultParams(**value)
    except TypeError as error:
        raise ConfigError(
            "simulated_fault_params must be SimulatedFaultParams or a mapping of its fields, "
            f"not {show(value)}: {error}"
        ) from None


def plan(params: SimulatedFaultParams, *, world_size: int, seed: Callable[[], int]) -> SimulatedFault:
    """Return the fault; the same on all ranks, except for the delay, which only the failing rank needs.

    Args:
        params: the settings.
        world_size: number of ranks.
        seed: the same on all ranks; called only if something is random, because it may take a collective.

    Raises:
        ConfigError: ``rank_to_fail`` doesn't exist; on all ranks alike.
    """
    rank, fault_type = params.rank_to_fail, params.fault_type
    if rank is not None and rank >= world_size:
        raise ConfigError(f"rank_to_fail must be a rank from 0 to {world_size - 1}, not {rank}")
    chosen_rank, chosen_type, draw = simulated.choose(fault_type, rank, world_size=world_size, seed=seed)
    delay_s = params.base_delay + params.rand_delay * draw.random()
    return SimulatedFault(type=chosen_type, rank=chosen_rank, delay_s=delay_s)


def start(params: SimulatedFaultParams, client: Callable[[], Any]) -> None:
    """Start the thread that makes this rank fail, if it is the one; a collective if something is random.

    Args:
        params: the settings.
        client: called when the fault is due, for the client to whose event log it is written.

    Raises:
        ConfigError: ``rank_to_fail`` doesn't exist; on all ranks alike.
    """
    simulated.start(plan(params, world_size=agreement.world_size(), seed=simulated.common_seed), client=client)
