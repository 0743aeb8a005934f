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

from megatron_ft.errors import ConfigError, nearest, show
from megatron_ft.link.base.wording import when
from megatron_ft.rank.base import agreement
from megatron_ft.rank.faults.injection import announce, inject
from megatron_ft.rank.faults.plan import FAULT_TYPES, IN_LOOP_TYPES, RANDOM, RANDOM_TYPES
from megatron_ft.rank.hooks.run_facts import current_iteration, log_fault
from megatron_ft.rank.hooks.user_errors import no_restart_for_mistakes

_DELAY_SPREAD = 0.2
_VARIABLE = "FT_SIM_FAULT_DESC"

_for_next_step: list[Callable[[], None]] = []
"""Faults for the training thread to inject in its next step."""
_slower_by_s = 0.0
_taken = ""
"""Description whose fault was started in this process."""


@dataclass
class SimulatedFaultParams:
    """A fault that one rank simulates, for tests and rehearsals, in every cycle anew."""

    fault_type: str
    """"rank_killed" (SIGKILL), "rank_hung" (SIGSTOP), "random": one of the two, "slow" or "exception"."""
    base_delay: float
    """Least delay in seconds from the start of the fit."""
    rand_delay: float | None = 0.0
    """Most seconds added at random; None: a fifth of ``base_delay``."""
    rank_to_fail: int | None = None
    """Rank that fails; None for a random one."""


def start_described(*, client: Callable[[], Any]) -> bool:
    """Start the fault that ``FT_SIM_FAULT_DESC`` asks for, once in a process. Return False if it asks for none.

    Raises:
        ConfigError: the value is invalid; on all ranks alike. The launcher is asked not to restart.
    """
    global _taken
    description = os.environ.get(_VARIABLE, "").strip()
    if description and description != _taken:
        with no_restart_for_mistakes():
            try:
                fault_type, rank, delay = (part.strip() for part in description.split(";"))
                params = SimulatedFaultParams(fault_type, float(delay), None, int(rank) if rank else None)
            except ValueError:
                like = "type;rank;delay, like rank_killed;1;60 or rank_hung;;60"
                raise ConfigError(f"{_VARIABLE} must be {like}, not {show(description)}") from None
            start(params, client=client)
        _taken = description
    return bool(description)


def plan(params: SimulatedFaultParams, *, world_size: int, seed: Callable[[], int]) -> SimulatedFaultParams:
    """Return the fault with type, rank and delay drawn. The delay is valid on the failing rank only.

    ``seed`` is called only if the rank or the type is left open, because it may take a collective.

    Raises:
        ConfigError: a value is invalid; decided alike on all ranks, before ``seed`` is called.
    """
    fault_type, rank = params.fault_type, params.rank_to_fail
    if fault_type not in (known := [*FAULT_TYPES, RANDOM]):
        raise ConfigError(f"Unknown fault type {fault_type}{nearest(str(fault_type), known)}")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size):
        raise ConfigError(f"simulated fault: the rank must be from 0 to {world_size - 1}, not {show(rank)}")
    for delay in (params.base_delay, 0.0 if params.rand_delay is None else params.rand_delay):
        if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 <= delay < math.inf:
            raise ConfigError(f"simulated fault: the delay must be a number of seconds from 0, not {show(delay)}")
    draw = random.Random(seed()) if rank is None or fault_type == RANDOM else random.Random()
    drawn_rank, drawn_type = draw.randrange(world_size), draw.choice(RANDOM_TYPES)
    spread_s = _DELAY_SPREAD * params.base_delay if params.rand_delay is None else params.rand_delay
    return SimulatedFaultParams(
        fault_type=drawn_type if fault_type == RANDOM else fault_type,
        base_delay=params.base_delay + spread_s * draw.random(),
        rank_to_fail=drawn_rank if rank is None else rank,
    )


def common_seed() -> int:
    """Return the same number on all ranks: rank 0's; without a process group, a hash of run and cycle."""
    if agreement.has_process_group():
        return int(agreement.from_rank_0(secrets.randbits(63)))
    text = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('FT_CYCLE', '0')}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def start(params: SimulatedFaultParams, *, client: Callable[[], Any]) -> None:
    """In the rank that is to fail, start the thread that waits for the moment.

    A collective (one broadcast) if the rank or the type is random and there is a process group. ``client`` is called
    when the fault is due, for the client to whose event log it is written.

    Raises:
        ConfigError: a value is invalid; on all ranks alike.
    """
    fault = plan(params, world_size=agreement.world_size(), seed=common_seed)
    if fault.rank_to_fail != agreement.rank():
        return
    what = f"rank {fault.rank_to_fail} {FAULT_TYPES[fault.fault_type]}"

    def carry_out() -> None:
        global _slower_by_s
        cycle, iteration = int(os.environ.get("FT_CYCLE", "0")), current_iteration(now := client())
        log_fault(now, fault.fault_type, iteration)
        where = f"in cycle {cycle}" if iteration is None else f"{when(iteration)} of cycle {cycle}"
        announce(f"{what} {where}")
        _slower_by_s = inject(fault.fault_type) or _slower_by_s

    def when_due() -> None:
        time.sleep(fault.base_delay)
        if fault.fault_type in IN_LOOP_TYPES:
            _for_next_step.append(carry_out)
        else:
            carry_out()

    announce(f"planned: {what} in {fault.base_delay:.1f} s ({fault.fault_type})")
    thread = threading.Thread(target=when_due, name="ft-simulated-fault")
    thread.daemon = True  # set, not given: Megatron-Bridge's tests look at it
    thread.start()


def on_step() -> None:
    """Inject a due fault, and slow the step down. The training thread calls this in each step."""
    if _for_next_step:
        _for_next_step.pop()()
    if _slower_by_s:
        time.sleep(_slower_by_s)
