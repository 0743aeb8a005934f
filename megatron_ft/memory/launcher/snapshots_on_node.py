"""Memory checkpoints in the launcher's machine: what goes from the keeper to the leader, and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from megatron_ft.job.rules.messages import StatusChanged
from megatron_ft.launcher.rules.events import Write
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Turn
from megatron_ft.link.base.codec import Parts, PartState
from megatron_ft.link.base.launcher_part import LauncherPart, PartEffect
from megatron_ft.link.facts.launcher import RestoreFailed, SnapshotRestored
from megatron_ft.memory.rules.lines import restore_failed
from megatron_ft.memory.rules.snapshots import (
    CopyTo,
    KeeperPort,
    Kept,
    OfSnapshots,
    Restore,
    Restored,
    Saved,
    Settled,
    StockTaken,
)

FromKeeper = StockTaken | Saved | KeeperPort | SnapshotRestored | Restored | RestoreFailed


@dataclass(frozen=True, slots=True)
class ToKeeper(PartEffect):
    """Tell the keeper what the job has decided about a snapshot."""

    fact: OfSnapshots


class SnapshotsOnNode(LauncherPart):
    """``found``: what this node can restore before its first cycle."""

    HEARS = FromKeeper | OfSnapshots

    def __init__(self, found: Kept) -> None:
        self._found = self._kept = found
        self._cycle: NodeCycle

    def status(self) -> Sequence[PartState]:
        return [self._kept]

    def begin(self, cycle: NodeCycle, turn: Turn) -> None:
        self._cycle = cycle

    def hear(self, event: FromKeeper | OfSnapshots, turn: Turn) -> None:
        cycle = self._cycle
        match event:
            case StockTaken(kept):
                # ranks of a cycle that ended before its nodes had met aren't known, and are as many as before
                ran, found = len(cycle.ranks) or self._kept.local_ranks, self._found
                local_ranks = ran if kept.snapshots else found.local_ranks
                self._kept = replace(kept, local_ranks=local_ranks, files=found.files, reads_files=found.reads_files)
                if turn.is_ready:
                    turn.do(StatusChanged(Parts(self._kept)))
            case Settled(key) if key.cycle == turn.runs:
                turn.do(ToKeeper(event))
            case CopyTo(number) if number == turn.runs:
                turn.do(ToKeeper(event))
            case Saved(key) if key.cycle == turn.runs:
                turn.do(event)
            case KeeperPort(number) | Restored(number) if number == turn.runs:
                turn.do(event)
            case SnapshotRestored() if event.cycle == turn.runs and cycle.mixed is None:
                restore = None if cycle.decision is None else cycle.decision.attachments.get(Restore)
                redone = None if restore is None else restore.redone
                turn.do(
                    Write(replace(event, ranks=tuple(cycle.ranks), redone=redone)),
                    Restored(cycle.cycle, event.key, newer_than=event.newer_than),
                )
            case RestoreFailed(rank=rank) if event.cycle == cycle.cycle and rank in cycle.ranks:
                if event.cycle == turn.runs:
                    cycle.fail_mixed(rank, restore_failed(rank, event.key.iteration, event.text))
                turn.do(Write(event))
