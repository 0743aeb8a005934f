"""Lines for the user about snapshots in memory. Pure."""

from __future__ import annotations

from megatron_ft.link.base.wording import counted, rough
from megatron_ft.memory.rules.snapshots import Restore


def restored(restore: Restore, newer_than: int | None = None) -> str:
    """All ranks have restored their state; ``newer_than``: iteration of the checkpoint that the script has on disk."""
    place = f"the files of an earlier life, written {rough(restore.age_s)} ago" if restore.files else "memory"
    head = f"restored iteration {restore.key.iteration} from {place}"
    if copied := sum(len(each.ranks) for each in restore.sources):
        head += f" ({counted(copied, 'rank')} from other nodes)"
    if newer_than is not None and newer_than >= 0:
        head += f", newer than the {newer_than} on disk"
    return head if restore.redone is None else f"{head}, {counted(restore.redone, 'iteration')} redone"


def mixed(rank: int, iteration: int) -> str:
    return f"rank {rank} begins without iteration {iteration}, which other ranks have restored from memory"


def restore_failed(rank: int, iteration: int, why: str) -> str:
    return f"rank {rank} can't restore iteration {iteration} from memory: {why}"


def without_snapshot(cycle: int, reason: str) -> str:
    return f"cycle {cycle} restores nothing from memory: {reason}"
