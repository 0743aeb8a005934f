"""Which snapshot the ranks of the next cycle go on from, if any, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from megatron_ft.core.wording import counted
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, Kept, Restore, SavedFiles, SnapshotKey

MOST_SOURCES = 64
"""Nodes from which segments are copied; the decision names them."""
MOST_TRIES = 2
"""Cycles that may restore a snapshot and fail before a new iteration; then it is bad."""


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """Snapshot for the next cycle. ``key`` None: none, because of ``reason``; empty if no node has any."""

    key: SnapshotKey | None = None
    reason: str = ""
    files: str = ""
    age_s: float = 0.0
    """As in `Restore`."""
    copies: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Ranks whose own node has no segment of them, by the node that has: its place in what was chosen from."""


@dataclass(frozen=True, slots=True)
class CycleEnd:
    """How the last cycle ended.

    Args:
        restored: what it went on from.
        failure: how it failed, as far as two failures can be compared; empty if no rank did: a node was lost, or a user
            asked for the end.
        reached: iteration at which it ended, -1 if it had begun none; None if unknown.
        advanced: an iteration beyond all before had begun, or a save to a file had ended.
        resumes_from_file: the file has what the next cycle needs, and memory hasn't.
        had_snapshot: all its nodes had one, which they had restored or saved.
        was_read: a rank has restored what the cycle was to go on from.
    """

    cycle: int
    restored: Restore | None = None
    failure: str = ""
    reached: int | None = None
    advanced: bool = False
    resumes_from_file: bool = False
    had_snapshot: bool = False
    was_read: bool = True


def choose(kept: Sequence[Kept], last: CycleEnd, spares: Sequence[Kept] = ()) -> SnapshotChoice:
    """Return the newest snapshot of which each node of the next cycle has the segments of its own ranks, or can copy
    them from another node.

    Args:
        kept: by place in the next cycle.
        last: snapshots written in that cycle count, and the one that it went on from. All others are of iterations
            that the job has left behind, or has done again since in another way.
        spares: nodes that don't take part, but have copies.
    """
    holders = [*kept, *spares]
    if not any(each.snapshots for each in holders):
        return SnapshotChoice(reason="no keeper says that it has a snapshot" if last.had_snapshot else "")
    without = [place for place, each in enumerate(kept) if not each.local_ranks]
    if without:
        return SnapshotChoice(reason=f"node {without[0]} has no snapshot")
    restored = None if last.restored is None else last.restored.key
    world = sum(each.local_ranks for each in kept)
    keys = {found.key for each in holders for found in each.snapshots}
    current = sorted((key for key in keys if key.cycle == last.cycle or key == restored), reverse=True)
    reason = f"no snapshot is of cycle {last.cycle}"
    for key in current:
        copies, reason = _copies(kept, holders, key, world)
        if not reason:
            return SnapshotChoice(key, copies=copies)
    return SnapshotChoice(reason=reason)


def choose_files(kept: Sequence[Kept], files: SavedFiles | None) -> SnapshotChoice:
    """Return the snapshot that an earlier life has left in files, if all nodes of the next cycle can restore it.

    Args:
        kept: by place in the next cycle.
        files: None if there are none, or if the job has left them behind.
    """
    if files is None:
        return SnapshotChoice()
    without = [place for place, each in enumerate(kept) if not each.reads_files]
    if without:
        return SnapshotChoice(reason=f"node {without[0]} was started without --ft-memory-checkpoint-dir")
    world = sum(each.local_ranks for each in kept)
    if files.world != world:
        of = f"of {counted(files.world, 'rank')}, not {world}"
        return SnapshotChoice(reason=f"the snapshot of iteration {files.iteration} in files is {of}")
    return SnapshotChoice(SnapshotKey(EARLIER_LIFE, 0, files.iteration), files=files.name, age_s=files.age_s)


def _copies(
    kept: Sequence[Kept], holders: Sequence[Kept], key: SnapshotKey, world: int
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], str]:
    """Return which holders have segments for ranks whose own node hasn't, or why not all ranks can have theirs."""

    def has(each: Kept) -> set[int]:
        return {rank for one in each.snapshots if (one.key, one.world) == (key, world) for rank in one.ranks}

    places: dict[int, int] = {}
    first = 0
    for place, each in enumerate(kept):
        places |= dict.fromkeys(set(range(first, first + each.local_ranks)) - has(each), place)
        first += each.local_ranks
    left, found = set(places), []
    for at, each in enumerate(holders):
        if each.port and (serves := left & has(each)):
            found.append((at, tuple(sorted(serves))))
            left -= serves
    if not left and len(found) <= MOST_SOURCES:
        return tuple(found), ""
    rank = min(left or places)
    worlds = [one.world for one in kept[places[rank]].snapshots if one.key == key]
    if not worlds:
        return (), f"node {places[rank]} has no snapshot of iteration {key.iteration}"
    if world not in worlds:
        return (), f"the snapshot of iteration {key.iteration} is of {counted(worlds[0], 'rank')}, not {world}"
    return (), f"node {places[rank]} has no snapshot of rank {rank}"


def first_restore(choice: SnapshotChoice) -> Restore | None:
    """Return what the first cycle goes on from."""
    return None if choice.key is None else Restore(choice.key, files=choice.files, age_s=choice.age_s)


def next_restore(choice: SnapshotChoice, last: CycleEnd) -> tuple[Restore | None, str]:
    """Return what the next cycle goes on from, and why if that is nothing (empty if there are no snapshots at all).

    A snapshot from which a cycle failed before a new iteration is restored once more. It is bad if that fails, too, or
    if the failure is that of the cycle before: a snapshot may hold what made the ranks fail. A cycle that failed before
    any rank had restored it says nothing about it.
    """
    key, before = choice.key, last.restored
    reached = last.reached if last.reached is not None and last.reached >= 0 else None
    if last.resumes_from_file and (key is not None or choice.reason):
        return None, "Megatron's re-run goes on from the checkpoint that it has saved"
    if key is None:
        return None, choice.reason
    if before is None or key != before.key:
        return Restore(key, failure=last.failure, reached=reached, files=choice.files, age_s=choice.age_s), ""
    if last.advanced and (last.reached is None or last.reached > key.iteration):  # it got beyond all before it
        return Restore(key, failure=last.failure, reached=reached, files=before.files, age_s=before.age_s), ""
    # what was done from this snapshot before is still to be done again
    reached = None if last.reached is None or before.reached is None else max(last.reached, before.reached)
    if not last.failure or not last.was_read:
        return replace(before, reached=reached), ""
    if last.failure == before.failure:
        return None, f"the cycle that restored iteration {key.iteration} failed in the same way as the one before"
    if before.tries + 1 >= MOST_TRIES:
        return None, f"{MOST_TRIES} cycles that restored iteration {key.iteration} failed before a new one"
    return replace(before, tries=before.tries + 1, reached=reached), ""
