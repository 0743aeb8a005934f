"""Whether what ended processes held on a device is free, from the driver's list of who holds memory there. Pure.

A process that has ended may be listed for a moment longer, while the driver takes its memory back; a new rank that
allocates then finds too little.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_ft.core.wording import listed

LONGEST_WAIT_S = 10.0
"""After that the memory is considered lost, and the ranks start without it."""
_FIRST_LOOK_S = 0.02
_SLOWEST_LOOK_S = 0.5
_SHOWN = 4


@dataclass(frozen=True)
class Holding:
    """Memory of one process on one device; ``used_bytes`` is None where the driver doesn't say."""

    device: int
    pid: int
    used_bytes: int | None = None


class MemoryStep(enum.Enum):
    """What to do after the driver's list was read."""

    GO_ON = "go on"
    LOOK_AGAIN = "look again"
    GIVE_UP = "give up"


def held_by(listed: Sequence[Holding], ended: Collection[int]) -> list[Holding]:
    """What ended processes hold. On a shared device, memory of other processes isn't waited for."""
    return [holding for holding in listed if holding.pid in ended]


def judge(held: Sequence[Holding], waited_s: float) -> MemoryStep:
    """``waited_s``: seconds since those processes were gone."""
    if not held:
        return MemoryStep.GO_ON
    return MemoryStep.LOOK_AGAIN if waited_s < LONGEST_WAIT_S else MemoryStep.GIVE_UP


def look_again_s(waited_s: float) -> float:
    """Seconds to the next look: soon at first, and never beyond the longest wait."""
    pause_s = min(max(_FIRST_LOOK_S, waited_s / 4), _SLOWEST_LOOK_S)
    return max(0.0, min(pause_s, LONGEST_WAIT_S - waited_s))


def describe(held: Sequence[Holding]) -> str:
    """For a line: which process holds how much, where."""
    parts = [f"process {each.pid} on GPU {each.device}{_size(each.used_bytes)}" for each in held]
    return listed(parts, most=_SHOWN)


def _size(used_bytes: int | None) -> str:
    return "" if used_bytes is None else f" ({used_bytes / 2**30:.1f} GiB)"
