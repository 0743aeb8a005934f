"""What the scripts of the bench say of themselves, and what that means. Nothing here waits or starts anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["PHASES", "Stamp", "last_pids", "parse", "phases", "steps_done"]

PHASES = ("user", "imported", "group", "step")
"""What every rank passes, in this order: first line of the script, imports done, process group made, a step done."""


class Stamp(NamedTuple):
    """One line of the file; ``at`` in seconds of the monotonic clock."""

    rank: int
    pid: int
    event: str
    number: int
    at: float


def parse(text: str) -> list[Stamp]:
    """All whole lines, oldest first."""
    found = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            rank, pid, event, number, at = line.split()
            found.append(Stamp(int(rank), int(pid), event, int(number), int(at) / 1e9))
    return found


def phases(stamps: Iterable[Stamp], since: float, ranks: int) -> dict[str, float] | None:
    """Seconds from ``since`` until the last rank has passed each phase; None until all of them have done a step.

    Only processes that have begun after it count. A launcher may need more than one attempt: of each rank it is the
    process that was first to do a step.
    """
    passed: dict[tuple[int, int], dict[str, float]] = {}
    for stamp in sorted(stamps, key=lambda stamp: stamp.at):
        key = (stamp.rank, stamp.pid)
        if stamp.event == "user" and stamp.at >= since:
            passed[key] = {"user": stamp.at}
        elif key in passed:
            passed[key].setdefault(stamp.event, stamp.at)
    first: dict[int, dict[str, float]] = {}
    for (rank, _), times in sorted(passed.items(), key=lambda item: item[1].get("step", float("inf"))):
        if "step" in times:
            first.setdefault(rank, times)
    if len(first) < ranks:
        return None
    return {phase: max(times[phase] for times in first.values()) - since for phase in PHASES}


def last_pids(stamps: Iterable[Stamp]) -> dict[int, int]:
    """The latest process of each rank."""
    return {stamp.rank: stamp.pid for stamp in stamps if stamp.event == "user"}


def steps_done(stamps: Iterable[Stamp], pids: Mapping[int, int]) -> int:
    """How many steps each of these processes has done at least."""
    done = dict.fromkeys(pids, 0)
    for stamp in stamps:
        if stamp.event == "step" and pids.get(stamp.rank) == stamp.pid:
            done[stamp.rank] += 1
    return min(done.values(), default=0)
