"""Planned faults: which rank suffers which fault, at which iteration of which cycle.

Rank, iteration and type may be random; the seed decides, alike on all ranks and in every run. Parsing, drawing and
looking up due faults are pure; ``rank/faults/injection.py`` acts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.errors import ConfigError, nearest, show
from megatron_ft.core.wording import when

RANDOM = "random"
RANDOM_TYPES = ("rank_killed", "rank_hung")
"""Types from which ``random`` draws."""
FAULT_TYPES: dict[str, str] = {
    "rank_killed": "is killed (SIGKILL)",
    "rank_hung": "is stopped (SIGSTOP)",
    "slow": "is slower from now on",
    "exception": "raises an exception",
}
"""Type -> what the rank does."""
IN_LOOP_TYPES = ("slow", "exception")
"""Only the thread that trains can do these to itself; the others hit the process from any thread."""

DEFAULT_SLOWER_BY_S = 1.0
_PLAN_KEYS = ("seed", "faults")
_FAULT_KEYS = ("cycle", "rank", "iteration", "type", "seconds")


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault, with rank, iteration and type drawn."""

    cycle: int
    rank: int
    iteration: int
    type: str
    seconds: float = DEFAULT_SLOWER_BY_S
    """Only for type ``slow``: seconds added to each step."""

    def describe(self) -> str:
        """Return the fault in one line."""
        what = FAULT_TYPES[self.type]
        if self.type == "slow":
            what += f", by {self.seconds:g} s for each step,"
        return f"rank {self.rank} {what} {when(self.iteration)} of cycle {self.cycle}"


@dataclass(frozen=True, kw_only=True)
class FaultEntry:
    """One fault as written; rank None is random, the range of iterations is inclusive."""

    cycle: int
    rank: int | None
    iterations: tuple[int, int]
    type: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    seed: int
    faults: tuple[FaultEntry, ...]
    source: str
    """Origin of the plan, for messages."""


def parse_plan(document: object, *, source: str = "fault plan") -> FaultPlan:
    """Check a plan.

    Args:
        document: ``{"seed": 0, "faults": [{"cycle", "rank", "iteration", "type", "seconds"}]}``;
            ``rank`` is a number or ``random``, ``iteration`` a number or a range ``[first, last]``, ``type`` one
            of :data:`FAULT_TYPES` or ``random``; ``seed`` (0), ``cycle`` (0) and ``seconds``
            (:data:`DEFAULT_SLOWER_BY_S`) may be missing.
        source: what to call it in messages.

    Raises:
        ConfigError: one line: what is wrong, and what is allowed.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"{source}: a mapping with the key 'faults' is expected, not {show(document)}")
    _check_keys(source, document, _PLAN_KEYS)
    entries = document.get("faults")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"{source}: faults must be a list, not {show(entries)}")
    return FaultPlan(
        seed=_whole(f"{source}: seed", document.get("seed", 0)),
        faults=tuple(_parse_fault(f"{source}: fault {n}", entry) for n, entry in enumerate(entries, start=1)),
        source=source,
    )


def resolve(plan: FaultPlan, world_size: int) -> tuple[PlannedFault, ...]:
    """Return the faults with everything drawn: the same on every rank, for the same plan and ``world_size``.

    Raises:
        ConfigError: the job has no such rank, or a rank has two faults at one moment.
    """
    resolved: list[PlannedFault] = []
    for number, entry in enumerate(plan.faults):
        # one generator per fault, so that editing one fault doesn't move the others
        draw = random.Random(f"{plan.seed}/{number}")
        drawn_type, drawn_rank = draw.choice(RANDOM_TYPES), draw.randrange(world_size)
        fault = PlannedFault(
            cycle=entry.cycle,
            rank=drawn_rank if entry.rank is None else entry.rank,
            iteration=draw.randint(*entry.iterations),
            type=drawn_type if entry.type == RANDOM else entry.type,
            seconds=entry.seconds,
        )
        where = f"{plan.source}: fault {number + 1}"
        if fault.rank >= world_size:
            raise ConfigError(f"{where}: rank must be below the number of ranks, {world_size}, not {fault.rank}")
        if due(resolved, fault.cycle, fault.rank, fault.iteration) is not None:
            raise ConfigError(
                f"{where}: rank {fault.rank} already has one {when(fault.iteration)} of cycle {fault.cycle}"
            )
        resolved.append(fault)
    return tuple(resolved)


def due(faults: Iterable[PlannedFault], cycle: int, rank: int, iteration: int) -> PlannedFault | None:
    """Return the fault of exactly this moment, None without one."""
    for fault in faults:
        if (fault.cycle, fault.rank, fault.iteration) == (cycle, rank, iteration):
            return fault
    return None


def _parse_fault(where: str, entry: object) -> FaultEntry:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: a mapping is expected, not {show(entry)}")
    _check_keys(where, entry, _FAULT_KEYS)
    for key in ("rank", "iteration", "type"):
        if key not in entry:
            raise ConfigError(f"{where}: {key} is missing")
    kind = entry["type"]
    if kind != RANDOM and (not isinstance(kind, str) or kind not in FAULT_TYPES):
        raise ConfigError(f"{where}: unknown type {show(kind)}{nearest(str(kind), [*FAULT_TYPES, RANDOM])}")
    if "seconds" in entry and kind != "slow":
        raise ConfigError(f"{where}: seconds is only for type 'slow', not {kind!r}")
    rank = entry["rank"]
    return FaultEntry(
        cycle=_whole(f"{where}: cycle", entry.get("cycle", 0)),
        rank=None if rank == RANDOM else _whole(f"{where}: rank", rank, f"{RANDOM!r} or "),
        iterations=_iterations(f"{where}: iteration", entry["iteration"]),
        type=kind,
        seconds=_seconds(f"{where}: seconds", entry.get("seconds", DEFAULT_SLOWER_BY_S)),
    )


def _iterations(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)):
        number = _whole(name, value, "a range [first, last] or ")
        return number, number
    if len(value) != 2:
        raise ConfigError(f"{name} must be a range [first, last] or a whole number from 0, not {show(value)}")
    first, last = (_whole(name, number) for number in value)
    if first > last:
        raise ConfigError(f"{name}: the range {show(value)} is empty")
    return first, last


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number above 0, not {show(value)}")
    return float(value)


def _whole(name: str, value: object, or_else: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be {or_else}a whole number from 0, not {show(value)}")
    return value


def _check_keys(where: str, mapping: Mapping[Any, Any], known: Sequence[str]) -> None:
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {show(key)}{nearest(str(key), known)}")
