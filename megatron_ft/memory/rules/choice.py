"""Which snapshot the ranks of the next cycle go on from, if any, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ft.link.base.wording import counted
from megatron_ft.memory.rules.snapshots import CopySource, Kept, Restore, SavedFiles, SnapshotKey

MOST_SOURCES = 64
"""Nodes from which segments are copied; the decision names them."""
MOST_TRIES = 2
"""Cycles that may restore a snapshot and fail before a new iteration; then it is bad."""


Chosen = tuple[Restore | None, str]
"""What a cycle goes on from, and why if that is nothing; the reason is empty if no node has anything."""


class Holder(NamedTuple):
    """A node, and where its keeper serves others; ``address`` empty: nowhere."""

    kept: Kept
    address: str = ""


@dataclass(frozen=True, slots=True)
class CycleEnd:
    """How the last cycle ended.

    Args:
        restored: what it went on from.
        failed: a rank has failed after one had restored: not if a node was lost, or a user asked for the end.
        reached: iteration at which it ended, -1 if it had begun none; None if unknown.
        advanced: an iteration beyond all before had begun, or a save to a file had ended.
        resumes_from_file: the file has what the next cycle needs, and memory hasn't.
        had_snapshot: all its nodes had one, which they had restored or saved.
    """

    cycle: int
    restored: Restore | None = None
    failed: bool = False
    reached: int | None = None
    advanced: bool = False
    resumes_from_file: bool = False
    had_snapshot: bool = False


def choose(holders: Sequence[Holder], nodes: int, last: CycleEnd, files: SavedFiles | None = None) -> Chosen:
    """Return the newest snapshot of which each node of the next cycle has the segments of its own ranks, or can copy
    them from another node. If there is none: that in ``files``, if all nodes can restore it.

    Args:
        holders: the ``nodes`` of the next cycle by place, and others, which may have copies.
        last: snapshots written in that cycle count, and the one that it went on from. All others are of iterations
            that the job has left behind, or has done again since in another way.
    """
    kept = [each.kept for each in holders]
    if files is None and not any(each.snapshots for each in kept):
        return None, "no keeper says that it has a snapshot" if last.had_snapshot else ""
    without = [place for place, each in enumerate(kept[:nodes]) if not each.local_ranks]
    if without:
        return None, f"node {without[0]} keeps no memory checkpoints"
    restored = None if last.restored is None else last.restored.key
    world = sum(each.local_ranks for each in kept[:nodes])
    keys = {found.key for each in kept for found in each.snapshots}
    reason = f"no snapshot is of cycle {last.cycle}"
    for key in sorted((key for key in keys if key.cycle == last.cycle or key == restored), reverse=True):
        sources, reason = _sources(holders, nodes, key, world)
        if not reason:
            return Restore(key, sources=sources), ""
    if files is None:
        return None, reason
    blind = [place for place, each in enumerate(kept[:nodes]) if not each.reads_files]
    if blind:
        return None, f"node {blind[0]} was started without --ft-memory-checkpoint-dir"
    if files.world != world:
        of = f"of {counted(files.world, 'rank')}, not {world}"
        return None, f"the snapshot of iteration {files.iteration} in files is {of}"
    return files.restore, ""


def _sources(holders: Sequence[Holder], nodes: int, key: SnapshotKey, world: int) -> tuple[tuple[CopySource, ...], str]:
    """Return who has the segments of ranks whose own node hasn't, or why not all ranks can have theirs."""

    def has(each: Holder) -> set[int]:
        return {rank for one in each.kept.snapshots if (one.key, one.world) == (key, world) for rank in one.ranks}

    places: dict[int, int] = {}
    first = 0
    for place, each in enumerate(holders[:nodes]):
        places |= dict.fromkeys(set(range(first, first + each.kept.local_ranks)) - has(each), place)
        first += each.kept.local_ranks
    left, found = set(places), []
    for each in holders:
        if each.address and (serves := left & has(each)):
            found.append(CopySource(each.address, tuple(sorted(serves))))
            left -= serves
    if not left and len(found) <= MOST_SOURCES:
        return tuple(found), ""
    rank = min(left or places)
    worlds = {one.world for one in holders[places[rank]].kept.snapshots if one.key == key}
    if worlds and world not in worlds:
        return (), f"the snapshot of iteration {key.iteration} is of {counted(min(worlds), 'rank')}, not {world}"
    return (), f"node {places[rank]} has no snapshot of rank {rank} of iteration {key.iteration}"


def next_restore(chosen: Chosen, last: CycleEnd) -> Chosen:
    """Return what the next cycle goes on from, given the newest snapshot that it can have.

    A snapshot from which a cycle failed before a new iteration is restored once more, and is bad if that fails, too: it
    may hold what makes the ranks fail. A cycle that failed before any rank had restored it says nothing about it.
    """
    (newest, reason), before = chosen, last.restored
    if last.resumes_from_file and (newest is not None or reason):
        return None, "Megatron's re-run goes on from the checkpoint that it has saved"
    if newest is None:
        return None, reason
    iteration = newest.key.iteration
    if before is not None and newest.key == before.key:  # the files that an earlier life has left stay its place
        newest = replace(newest, files=before.files, age_s=before.age_s)
    got_beyond = last.advanced and (last.reached is None or last.reached > iteration)
    if before is None or newest.key != before.key or got_beyond:
        reached = last.reached if last.reached is not None and last.reached >= 0 else None
        return replace(newest, reached=reached), ""
    # what was done from this snapshot before is still to be done again
    reached = None if last.reached is None or before.reached is None else max(last.reached, before.reached)
    tries = before.tries + last.failed
    if tries >= MOST_TRIES:
        return None, f"{MOST_TRIES} cycles that restored iteration {iteration} failed before a new one"
    return replace(newest, tries=tries, reached=reached), ""
