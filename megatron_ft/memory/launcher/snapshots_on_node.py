"""Memory checkpoints in the launcher's machine: what goes from the keeper to the leader, and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from megatron_ft.job.rules.messages import Ready
from megatron_ft.launcher.rules.events import Write
from megatron_ft.launcher.rules.node_cycle import NodeCycle
from megatron_ft.launcher.rules.turn import Turn
from megatron_ft.link.base.codec import Parts, PartState
from megatron_ft.link.base.launcher_part import LauncherPart, PartEffect
from megatron_ft.link.facts.launcher import RestoreFailed, SnapshotRestored
from megatron_ft.memory.base.keeper_messages import RankBegan
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
    SnapshotKey,
    StockTaken,
)

FromKeeper = StockTaken | Saved | KeeperPort | RankBegan | RestoreFailed


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
        self._began: dict[int, float | None] = {}
        """Seconds that each rank took to restore what was chosen for the cycle; None if it trains without."""

    def status(self) -> Sequence[PartState]:
        return [self._kept]

    def begin(self, cycle: NodeCycle, turn: Turn) -> None:
        self._cycle, self._began = cycle, {}

    def hear(self, event: FromKeeper | OfSnapshots, turn: Turn) -> None:
        cycle = self._cycle
        match event:
            case StockTaken(kept, is_last):
                self._found = Kept() if is_last else self._found  # then neither files nor copies can be had
                self._kept = replace(self._found, snapshots=kept.snapshots, port=kept.port)
                if turn.is_ready:
                    turn.do(Ready(Parts(self._kept)))
            case Settled(SnapshotKey(number)) | CopyTo(number) if number == turn.runs:
                turn.do(ToKeeper(event))
            case Saved(SnapshotKey(number)) | KeeperPort(number) if number == turn.runs:
                turn.do(event)
            case RankBegan() if turn.runs == cycle.cycle and (chosen := self._chosen(event)) is not None:
                self._rank_began(event, chosen, turn)
            case RestoreFailed(rank=rank) if self._chosen(event) is not None:
                if turn.runs == cycle.cycle:
                    cycle.fail_mixed(rank, restore_failed(rank, event.key.iteration, event.text))
                turn.do(Write(event))

    def _chosen(self, said: RankBegan | RestoreFailed) -> Restore | None:
        """Return what was chosen for the cycle, if the rank hasn't begun with or without it before."""
        cycle = self._cycle
        chosen = None if cycle.decision is None or cycle.mixed is not None else cycle.decision.attachments.get(Restore)
        is_it = chosen is not None and chosen.key == said.key and said.rank in cycle.ranks
        return chosen if is_it and said.rank not in self._began else None

    def _rank_began(self, message: RankBegan, chosen: Restore, turn: Turn) -> None:
        """Tell when the first rank has restored the snapshot, when the first one trains without, and when all have."""
        cycle = self._cycle
        self._began[message.rank] = message.seconds
        took = [each for each in self._began.values() if each is not None]
        is_whole = len(took) == len(cycle.ranks)
        told = Restored(cycle.cycle, chosen.key, is_whole=is_whole, newer_than=message.newer_than)
        if message.seconds is None:
            if len(self._began) - len(took) == 1:
                turn.do(replace(told, without=message.rank))
            return
        if is_whole:
            ranks, newer_than = tuple(cycle.ranks), message.newer_than
            record = SnapshotRestored(cycle=cycle.cycle, key=chosen.key, ranks=ranks, newer_than=newer_than)
            turn.do(Write(replace(record, seconds=max(took), redone=chosen.redone)))
        if is_whole or len(took) == 1:
            turn.do(told)
