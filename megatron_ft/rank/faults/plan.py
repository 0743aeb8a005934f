"""Fault plans: which rank suffers which fault, at which iteration of which cycle.

Rank, iteration and type may be random; the seed decides, alike on all ranks and in every run.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from megatron_ft.errors import ConfigError
from megatron_ft.link.base.wording import when

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
_MOST_SLOWER_BY_S = 1e6
_Whole = Annotated[int, Meta(ge=0)]
_ALLOWED = (
    "a plan has a list 'faults' and may have a 'seed' from 0; a fault has a rank (from 0, or 'random'), an iteration "
    f"(from 0, or a range [first, last]) and a type ({', '.join(FAULT_TYPES)} or 'random'), and may have a cycle (from "
    "0) and, if it is 'slow', seconds (above 0)"
)


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


class FaultEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault as written; the range of iterations is inclusive."""

    rank: _Whole | Literal["random"]
    iteration: _Whole | Annotated[list[_Whole], Meta(min_length=2, max_length=2)]
    type: Literal["rank_killed", "rank_hung", "slow", "exception", "random"]
    cycle: _Whole = 0
    seconds: Annotated[float, Meta(gt=0, le=_MOST_SLOWER_BY_S)] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.iteration, list) and self.iteration[0] > self.iteration[1]:
            raise ValueError(f"the range {self.iteration} is empty")
        if self.seconds is not None and self.type != "slow":
            raise ValueError(f"seconds is only for type 'slow', not {self.type!r}")


class _FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    faults: tuple[FaultEntry, ...]
    seed: _Whole = 0


def read_fault_plan(path: str | os.PathLike[str], world_size: int) -> tuple[PlannedFault, ...]:
    """Return the faults of a YAML file, drawn: the same on every rank of a job of this size.

    Raises:
        ConfigError: the file can't be read, isn't YAML or isn't a plan, the job has no such rank, or a rank has two
        faults at one moment; one line that says where, and what is allowed.
    """
    import yaml  # only a rank with a plan needs it

    source = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            plan = msgspec.convert(yaml.safe_load(file), _FaultPlan)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"{source}: the fault plan isn't YAML that can be read: {why}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}; {_ALLOWED}") from None
    drawn: dict[tuple[int, int, int], PlannedFault] = {}
    for number, entry in enumerate(plan.faults):
        fault = _draw(entry, random.Random(f"{plan.seed}/{number}"), world_size)
        where = f"{source}: fault {number + 1}"
        if fault.rank >= world_size:
            raise ConfigError(f"{where}: rank must be below the number of ranks, {world_size}, not {fault.rank}")
        if drawn.setdefault((fault.cycle, fault.rank, fault.iteration), fault) is not fault:
            raise ConfigError(
                f"{where}: rank {fault.rank} already has one {when(fault.iteration)} of cycle {fault.cycle}"
            )
    return tuple(drawn.values())


def _draw(entry: FaultEntry, draw: random.Random, world_size: int) -> PlannedFault:
    """Return the fault with one generator of its own, so that editing one fault doesn't move the others."""
    drawn_type, drawn_rank = draw.choice(RANDOM_TYPES), draw.randrange(world_size)
    return PlannedFault(
        cycle=entry.cycle,
        rank=drawn_rank if isinstance(entry.rank, str) else entry.rank,
        iteration=draw.randint(*(entry.iteration if isinstance(entry.iteration, list) else [entry.iteration] * 2)),
        type=drawn_type if entry.type == RANDOM else entry.type,
        seconds=DEFAULT_SLOWER_BY_S if entry.seconds is None else entry.seconds,
    )
