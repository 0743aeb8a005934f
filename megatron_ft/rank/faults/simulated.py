"""A simulated fault after a delay, from a configuration or ``FT_SIM_FAULT_DESC``.

A thread waits for the moment. The thread injects most faults itself; those that only the training thread can carry out
(see ``IN_LOOP_TYPES``) are injected in that thread's next training step.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.errors import ConfigError, nearest, show
from megatron_ft.core.facts.rank import FaultInjected
from megatron_ft.core.fault_plan import FAULT_TYPES, IN_LOOP_TYPES, RANDOM, RANDOM_TYPES
from megatron_ft.core.wording import when
from megatron_ft.rank.base import agreement
from megatron_ft.rank.faults.acts import Slowness, announce, inject
from megatron_ft.rank.hooks.loop_state import FaultToleranceSettings
from megatron_ft.rank.hooks.run_facts import current_iteration, log_event
from megatron_ft.rank.hooks.user_errors import no_restart_for_mistakes

_DELAY_SPREAD = 0.2
_VARIABLE = "FT_SIM_FAULT_DESC"

_for_next_step: list[Callable[[], None]] = []
"""Faults for the training thread to inject in its next step."""
_slowness = Slowness()
_taken = ""
"""Description whose fault was started in this process."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFault:
    """Planned fault; the same on all ranks."""

    type: str
    rank: int
    delay_s: float
    """Seconds from now; valid on the failing rank only."""

    def describe(self) -> str:
        """Return one line of description."""
        return f"rank {self.rank} {FAULT_TYPES[self.type]} in {self.delay_s:.1f} s ({self.type})"


def is_described() -> bool:
    """Return True if ``FT_SIM_FAULT_DESC`` asks for a fault."""
    return bool(os.environ.get(_VARIABLE, "").strip())


def take_description() -> FaultToleranceSettings | None:
    """Return the settings in ``FT_SIM_FAULT_DESC``; None if it is empty, or was taken by this process before.

    Raises:
        ConfigError: the value is invalid; on all ranks alike. The launcher is asked not to restart.
    """
    global _taken
    description = os.environ.get(_VARIABLE, "")
    if not description.strip() or description == _taken:
        return None
    with no_restart_for_mistakes():
        settings = _settings(description)
    _taken = description
    return settings


def _settings(description: str) -> FaultToleranceSettings:
    try:
        fault_type, rank, delay = (part.strip() for part in description.split(";"))
        return FaultToleranceSettings(
            simulate_fault=True,
            simulated_fault_type=fault_type,
            simulated_fault_rank=int(rank) if rank else None,
            simulated_fault_base_delay=float(delay),
        )
    except ValueError:
        raise ConfigError(
            f"{_VARIABLE} must be type;rank;delay, like rank_killed;1;60 or rank_hung;;60, not {show(description)}"
        ) from None


def plan_fault(config: Any, *, world_size: int, seed: Callable[[], int]) -> SimulatedFault:
    """Return the fault that the configuration asks for, drawing what it leaves open.

    Args:
        config: has ``simulated_fault_type``, ``simulated_fault_rank``, ``simulated_fault_base_delay`` (s).
        world_size: number of ranks.
        seed: called only if the rank or the type is left open, because it may take a collective.

    Raises:
        ConfigError: a value is invalid; decided alike on all ranks, before ``seed`` is called.
    """
    fault_type, rank, base = (
        config.simulated_fault_type,
        config.simulated_fault_rank,
        config.simulated_fault_base_delay,
    )
    known = [*FAULT_TYPES, RANDOM]
    if fault_type not in known:
        raise ConfigError(f"Unknown fault type {fault_type}{nearest(str(fault_type), known)}")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size):
        raise ConfigError(f"simulated_fault_rank must be a rank from 0 to {world_size - 1}, not {show(rank)}")
    if isinstance(base, bool) or not isinstance(base, (int, float)) or not (math.isfinite(base) and base >= 0):
        raise ConfigError(f"simulated_fault_base_delay must be a number of seconds from 0, not {show(base)}")
    rank, fault_type, draw = choose(fault_type, rank, world_size=world_size, seed=seed)
    return SimulatedFault(type=fault_type, rank=rank, delay_s=base * (1.0 + _DELAY_SPREAD * draw.random()))


def choose(
    fault_type: str, rank: int | None, *, world_size: int, seed: Callable[[], int]
) -> tuple[int, str, random.Random]:
    """Return rank, type, and a generator for the delay, drawing what is left open; ``seed`` as in `plan_fault`."""
    draw = random.Random(seed()) if rank is None or fault_type == RANDOM else random.Random()
    drawn_rank, drawn_type = draw.randrange(world_size), draw.choice(RANDOM_TYPES)
    return drawn_rank if rank is None else rank, drawn_type if fault_type == RANDOM else fault_type, draw


def common_seed() -> int:
    """Return the same number on all ranks: rank 0's; without a process group, a hash of run and cycle."""
    if agreement.has_process_group():
        return int(agreement.from_rank_0(secrets.randbits(63)))
    text = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('FT_CYCLE', '0')}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def maybe_start(config: Any, *, client: Callable[[], Any]) -> None:
    """See ``fault_tolerance.maybe_setup_simulated_fault``; ``client`` is asked when it is due."""
    if config is None or not config.simulate_fault:
        return
    start(plan_fault(config, world_size=agreement.world_size(), seed=common_seed), client=client)


def start(fault: SimulatedFault, *, client: Callable[[], Any]) -> None:
    """In the rank that is to fail, start the thread that waits for the moment. Arguments as of ``maybe_start``."""
    if fault.rank != agreement.rank():
        return

    def when_due() -> None:
        time.sleep(fault.delay_s)
        if fault.type in IN_LOOP_TYPES:
            _for_next_step.append(lambda: _carry_out(fault, client()))
        else:
            _carry_out(fault, client())

    announce(f"planned: {fault.describe()}")
    thread = threading.Thread(target=when_due, name="ft-simulated-fault")
    thread.daemon = True
    thread.start()


def on_step() -> None:
    """Inject a due fault, and slow the step down. The training thread calls this in each step."""
    if _for_next_step:
        _for_next_step.pop()()
    _slowness.on_step()


def _carry_out(fault: SimulatedFault, client: Any) -> None:
    cycle, iteration = int(os.environ.get("FT_CYCLE", "0")), current_iteration(client)
    log_event(client, FaultInjected(type=fault.type, rank=fault.rank, iteration=iteration, cycle=cycle))
    where = f"in cycle {cycle}" if iteration is None else f"{when(iteration)} of cycle {cycle}"
    announce(f"rank {fault.rank} {FAULT_TYPES[fault.type]} {where}")
    inject(fault.type, slowness=_slowness)
