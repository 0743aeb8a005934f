"""A simulated fault after a delay: which rank, what and when, and the thread that does it."""

from __future__ import annotations

import hashlib
import math
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.config_fields import nearest, show
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fault_plan import FAULT_TYPES, RANDOM, RANDOM_TYPES
from megatron_ft.rank import agreement
from megatron_ft.rank.fault_injector import inject
from megatron_ft.rank.learning import log_event

__all__ = ["SimulatedFault", "common_seed", "maybe_start", "plan_fault"]

_DELAY_SPREAD = 0.2


@dataclass(frozen=True, kw_only=True)
class SimulatedFault:
    """Which rank does what to itself; the same on all ranks."""

    type: str
    rank: int
    delay_s: float
    """From now; known to the rank itself."""

    def describe(self) -> str:
        """One line."""
        return f"rank {self.rank} {FAULT_TYPES[self.type]} in {self.delay_s:.1f} s ({self.type})"


def plan_fault(config: Any, *, world_size: int, seed: Callable[[], int]) -> SimulatedFault:
    """What the configuration asks for; what it leaves open is drawn from ``seed``.

    Args:
        config: has ``simulated_fault_type``, ``simulated_fault_rank``, ``simulated_fault_base_delay`` (s).
        world_size: number of ranks.
        seed: asked only if the rank or the type is left open, because the answer may take a collective.

    Raises:
        ConfigError: a value that can't be right; decided alike on all ranks, before the seed is asked for.
    """
    fault_type, rank, base = (
        config.simulated_fault_type,
        config.simulated_fault_rank,
        config.simulated_fault_base_delay,
    )
    known = [*RANDOM_TYPES, RANDOM]
    if fault_type not in known:
        raise ConfigError(f"Unknown fault type {fault_type}{nearest(str(fault_type), known)}")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size):
        raise ConfigError(f"simulated_fault_rank must be a rank from 0 to {world_size - 1}, not {show(rank)}")
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not (math.isfinite(base) and base >= 0):
        raise ConfigError(f"simulated_fault_base_delay must be a number of seconds from 0, not {show(base)}")
    is_open = rank is None or fault_type == RANDOM
    draw = random.Random(seed()) if is_open else random.Random()
    drawn_rank, drawn_type = draw.randrange(world_size), draw.choice(RANDOM_TYPES)
    return SimulatedFault(
        type=drawn_type if fault_type == RANDOM else fault_type,
        rank=drawn_rank if rank is None else rank,
        delay_s=base * (1.0 + _DELAY_SPREAD * draw.random()),
    )


def common_seed() -> int:
    """The same number on all ranks: rank 0's, or, without a process group, made from run and cycle."""
    if agreement.has_process_group():
        return int(agreement.from_rank_0(secrets.randbits(63)))
    text = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('FT_CYCLE', '0')}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def maybe_start(config: Any, *, client: Callable[[], Any]) -> None:
    """See ``fault_tolerance.maybe_setup_simulated_fault``; ``client`` is asked when the fault is due."""
    if config is None or not config.simulate_fault:
        return
    fault = plan_fault(config, world_size=agreement.world_size(), seed=common_seed)
    if fault.rank != agreement.rank():
        return
    cycle = int(os.environ.get("FT_CYCLE", "0"))

    def run() -> None:
        time.sleep(fault.delay_s)
        log_event(client(), "fault_injected", type=fault.type, rank=fault.rank, iteration=None, cycle=cycle)
        print(
            f"FT: simulated fault: rank {fault.rank} {FAULT_TYPES[fault.type]} now",
            file=sys.stderr,
            flush=True,
        )
        inject(fault.type)

    print(f"FT: simulated fault: {fault.describe()}", file=sys.stderr, flush=True)
    thread = threading.Thread(target=run, name="ft-simulated-fault")
    thread.daemon = True
    thread.start()
