"""Memory checkpoints at the leader of a job: a part of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.job.rules.job_cycle import JobCycle, Seat
from megatron_ft.job.rules.leader_part import Answers, LeaderPart, ToNodes
from megatron_ft.job.rules.messages import Report, Verdict
from megatron_ft.job.rules.nodes import Node
from megatron_ft.job.rules.restart_policy import NodeState, Outcome
from megatron_ft.link.base.codec import PartState
from megatron_ft.link.facts.launcher import Cause, CauseKind
from megatron_ft.memory.leader.complete_snapshots import CompleteSnapshots
from megatron_ft.memory.rules import lines
from megatron_ft.memory.rules.choice import CycleEnd, Holder, choose, next_restore
from megatron_ft.memory.rules.snapshots import (
    EARLIER_LIFE,
    CopyTo,
    KeeperPort,
    Kept,
    OfSnapshots,
    Restore,
    Restored,
    Saved,
    Settled,
    SnapshotStatus,
)


class SnapshotsAtLeader(LeaderPart):
    """Which snapshots are complete, where copies are kept, and what the ranks of the next cycle go on from."""

    HEARS = Saved | Restored | KeeperPort
    SAYS = OfSnapshots
    QUIET = (Saved,)

    def __init__(self) -> None:
        self._cycle: JobCycle | None = None
        self._snapshots = CompleteSnapshots(-1, 0)
        self._copies: dict[int, str] = {}
        """Addresses of keepers that take copies, by the place of their node."""
        self._without = ""
        """Why the cycle that was planned last restores nothing; empty if it does, or if there are no snapshots."""

    def begin(self, cycle: JobCycle) -> Answers:
        decision, reason = cycle.decision, self._without
        self._cycle, self._without = cycle, ""
        restore = decision.attachments.get(Restore)
        cycle.has_restored = restore is not None
        self._snapshots = CompleteSnapshots(decision.cycle, decision.world, None if restore is None else restore.key)
        self._copies = {}
        return [lines.without_snapshot(decision.cycle, reason)] if reason else []

    def joined(self, node: Node, place: int) -> Answers:
        status, cycle = node.standing.parts.get(SnapshotStatus), self._cycle
        assert cycle is not None
        if status is None or status.cycle != cycle.decision.cycle:
            return []
        answers = []
        # what another coordinator told this node is complete others may not have been told: they hold it then
        for key in filter(None, (status.complete, *status.saved)):
            answers += self._told(cycle, self._snapshots.saved(place, key))
        if status.restored is not None:
            self._snapshots.restored(place, status.restored)  # the coordinator before may have said it of all
        if status.port:
            answers += self._serves(node, place, KeeperPort(status.cycle, status.port))
        was_complete = status.complete is not None and status.complete.cycle == status.cycle
        cycle.has_snapshot = cycle.has_snapshot or was_complete or self._snapshots.has_complete
        missed = self._snapshots.missed(status.saved)
        return answers if missed is None else [*answers, ToNodes(missed, [place])]

    def hear(self, node: Node, place: int, message: Saved | Restored | KeeperPort, now_s: float) -> Answers:
        cycle = self._cycle
        assert cycle is not None
        if isinstance(message, KeeperPort):
            return self._serves(node, place, message)
        if isinstance(message, Saved):
            answers = self._told(cycle, self._snapshots.saved(place, message.key))
            cycle.has_snapshot = cycle.has_snapshot or self._snapshots.has_complete
            return answers
        restore = cycle.decision.attachments.get(Restore)
        if restore is None:
            return []
        have_all = self._snapshots.restored(place, message)
        if self._snapshots.is_read and self._snapshots.without is not None:
            at, rank = self._snapshots.without
            cause = Cause(kind=CauseKind.CRASH, text=lines.mixed(rank, restore.key.iteration), rank=rank)
            cycle.changed(at, Report(cycle.decision.cycle, NodeState.UNHEALTHY, cause, is_mixed=True))
        return [lines.restored(restore, message.newer_than)] if have_all else []

    def _told(self, cycle: JobCycle, settled: Settled | None) -> list[ToNodes]:
        return [] if settled is None or cycle.outcome is not None else [ToNodes(settled)]

    def _serves(self, node: Node, place: int, message: KeeperPort) -> list[ToNodes]:
        """Tell the nodes that copy their snapshots to that one, or take its copies, where to.

        Each node keeps copies of one other. With segments of nodes that is one of the next segment: what takes a whole
        segment down leaves its copies.
        """
        address, cycle, here = node.address_of(message.port), self._cycle, self._copies
        if cycle is None or not address or message.cycle != cycle.decision.cycle:
            return []
        here[place] = address
        nodes, segment = cycle.decision.world, cycle.rules.segment
        step = segment if nodes > segment > 0 else 1
        pairs = (place, (place + step) % nodes), ((place - step) % nodes, place)
        told = [(at, CopyTo(message.cycle, here[to])) for at, to in pairs if at != to and at in here and to in here]
        return [ToNodes(copy_to, [at]) for at, copy_to in told]

    def attachment(self, chosen: Sequence[Node], spares: Sequence[Node]) -> Sequence[PartState]:
        """Choose the snapshot for the next cycle, and keep the reason if there is none.

        ``spares`` may have copies. As long as no later snapshot was restored, a cycle may go on from the files that an
        earlier life has left again.
        """
        holders = [_holder(node) for node in (*chosen, *spares)]
        files = next((each.kept.files for each in holders if each.kept.files), None)
        if self._cycle is not None:
            last = self._end_of(self._cycle)
        else:
            last = CycleEnd(EARLIER_LIFE, None if files is None else files.restore)
        if files is not None and (last.restored is None or last.restored.files != files.name):
            files = None
        restore, self._without = next_restore(choose(holders, len(chosen), last, files), last)
        return [] if restore is None else [restore]

    def _end_of(self, cycle: JobCycle) -> CycleEnd:
        verdict, restored = cycle.verdict, cycle.decision.attachments.get(Restore)
        assert verdict is not None
        # a restore that fails says as much about a snapshot as one that is followed by a failure
        was_read = self._snapshots.is_read or any(seat.report.is_mixed for seat in cycle.seats)
        return CycleEnd(
            cycle.decision.cycle,
            restored,
            failed=was_read and ranks_failed(verdict, cycle.seats),
            reached=None if verdict.reached is None else verdict.reached.last,
            advanced=cycle.decision.advance.is_exceeded(verdict.reached),
            resumes_from_file=verdict.cause.rerun is not None,
            had_snapshot=restored is not None or cycle.has_snapshot,
        )


def _holder(node: Node) -> Holder:
    kept = node.standing.parts.get(Kept) or Kept()
    return Holder(kept, node.address_of(kept.port) if kept.port else "")


def ranks_failed(verdict: Verdict, seats: Sequence[Seat]) -> bool:
    """Return True if a rank has ended the cycle, or one of those that failed in it did so by itself."""
    own = [seat.report.cause for seat in seats if seat.state is NodeState.UNHEALTHY and not seat.report.cause.follows]
    kinds = {cause.kind for cause in (verdict.cause, *own)}
    return verdict.outcome is Outcome.FAILED and bool(kinds & {CauseKind.CRASH, CauseKind.HANG, CauseKind.SIGNAL})
