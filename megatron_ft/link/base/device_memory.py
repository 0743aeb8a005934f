"""Device memory of ended processes, judged by the driver's list of holders. Pure.

An ended process may be listed a moment longer, while the driver takes its memory back; a new rank that allocates then
finds too little.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_ft.link.base.codec import Fact, Int
from megatron_ft.link.base.wording import listed

LONGEST_WAIT_S = 10.0
"""Seconds after which the memory counts as lost, and the ranks start without it."""
_FIRST_LOOK_S = 0.02
_SLOWEST_LOOK_S = 0.5
_SHOWN = 4


class Holding(Fact, frozen=True):
    """Memory of one process on one device; ``used_bytes`` is None where the driver doesn't say."""

    device: Int
    pid: Int
    used_bytes: Int | None = None


def held_by(listed: Sequence[Holding], ended: Collection[int]) -> list[Holding]:
    """Return the memory held by ended processes; that of other processes isn't waited for."""
    return [holding for holding in listed if holding.pid in ended]


def look_again_s(held: Sequence[Holding], waited_s: float) -> float | None:
    """Return the seconds until the next look, ``waited_s`` after the processes ended; None if nothing is waited for.

    Short at first, and never beyond the longest wait.
    """
    if not held or waited_s >= LONGEST_WAIT_S:
        return None
    pause_s = min(max(_FIRST_LOOK_S, waited_s / 4), _SLOWEST_LOOK_S)
    return min(pause_s, LONGEST_WAIT_S - waited_s)


def describe(held: Sequence[Holding]) -> str:
    """Describe the holdings for a line: process, device, size."""
    parts = [f"process {each.pid} on GPU {each.device}{_size(each.used_bytes)}" for each in held]
    return listed(parts, most=_SHOWN)


def _size(used_bytes: int | None) -> str:
    return "" if used_bytes is None else f" ({used_bytes / 2**30:.1f} GiB)"
