"""Simulated faults of the Lightning callbacks: one rank does something to itself after a delay."""

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
    """A fault that one rank simulates, for tests and rehearsals. It is simulated anew in every cycle.

    Raises:
        ConfigError: a value that can't be right (a ValueError).
    """

    fault_type: str
    """"rank_killed" (SIGKILL), "rank_hung" (SIGSTOP), or "random": one of the two."""
    base_delay: float
    """Seconds from the start of the fit, at least."""
    rand_delay: float = 0.0
    """Seconds added at random, at most."""
    rank_to_fail: int | None = None
    """None: a random rank."""

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
    """Take parameters in any form a constructor is given them: the object, or a mapping of its fields.

    Raises:
        ConfigError: it is neither, or a value in it can't be right.
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
    """Who does what when; the same on all ranks, but for the delay, which only the rank itself needs to know.

    Args:
        params: what is asked for.
        world_size: number of ranks.
        seed: the same on all ranks; asked only if something is left to chance, because it may take a collective.

    Raises:
        ConfigError: there is no such rank; on all ranks alike.
    """
    rank, fault_type = params.rank_to_fail, params.fault_type
    if rank is not None and rank >= world_size:
        raise ConfigError(f"rank_to_fail must be a rank from 0 to {world_size - 1}, not {rank}")
    chosen_rank, chosen_type, draw = simulated.choose(fault_type, rank, world_size=world_size, seed=seed)
    delay_s = params.base_delay + params.rand_delay * draw.random()
    return SimulatedFault(type=chosen_type, rank=chosen_rank, delay_s=delay_s)


def start(params: SimulatedFaultParams, client: Callable[[], Any]) -> None:
    """In the rank that is to fail, start the thread that makes it; a collective if something is left to chance.

    Args:
        params: what is asked for.
        client: asked for the client, to whose event log the fault is written, when it is due.

    Raises:
        ConfigError: there is no such rank; on all ranks alike.
    """
    simulated.start(plan(params, world_size=agreement.world_size(), seed=simulated.common_seed), client=client)
