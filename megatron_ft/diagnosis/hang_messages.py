"""Messages about hangs between the launchers and the leader. Pure."""

from __future__ import annotations

from megatron_ft.diagnosis.cycle_cause import COLLECTIVES
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot
from megatron_ft.job.rules.restart_policy import Reached
from megatron_ft.link.base.codec import Int, PartMessage
from megatron_ft.link.facts.launcher import HangReported
from megatron_ft.link.facts.shared import RankHung


class Hang(PartMessage, frozen=True):
    """A rank of this node was found hung: every node is to collect evidence. ``passive``: the ranks run on.

    ``decides``: the result decides which ranks are terminated; their nodes do that.
    """

    cycle: Int
    verdict: RankHung
    reached: Reached | None = None
    passive: bool = False
    decides: bool = False


class RankSnapshots(PartMessage, frozen=True):
    """Snapshots of a node's ranks. ``passive``: as in the `DiagnoseHang` before; ``more``: further ones follow."""

    cycle: Int
    notes: tuple[RankSnapshot, ...]
    passive: bool = False
    more: bool = False


class DiagnoseHang(PartMessage, frozen=True):
    """A rank hangs: collect snapshots of yours, and send them (`RankSnapshots`). ``passive``: they run on.

    ``looks``: the snapshots also say what the ranks do meanwhile.
    """

    cycle: Int
    passive: bool = False
    looks: bool = False


class Reviewed(PartMessage, frozen=True):
    """Result of an observe-only diagnosis: why no collective completes, or why an interval lasts.

    Args:
        asker: the place of the node that had asked for it.
        verdict: on the rank that was found first; where the review decides, on ``rank``, if that is known.
        text: which rank keeps the others waiting and where it is, and what they do; or that none waits.
        rank: that rank; None if it isn't known.
        is_waited: some rank waits in a collective.
        decides: it answers suspicions, and under ``min-healthy`` says which ranks are to be terminated.
        hanging: these ranks; empty if the evidence doesn't show them. Only where the review decides.
        progress: what a rank did while the evidence was collected, in words; empty if none was seen to do anything.
    """

    cycle: Int
    asker: Int
    verdict: RankHung
    text: str
    rank: Int | None = None
    is_waited: bool = False
    decides: bool = False
    hanging: tuple[Int, ...] = ()
    progress: str = ""

    @property
    def reports(self) -> str:
        """Kind of interval that outlasts a timeout that is only reported; empty if the review is of something else."""
        return "" if self.decides or self.verdict.kind == COLLECTIVES else self.verdict.timed

    def record(self, *, ends: bool = False) -> HangReported:
        """Return what the node that reports it writes to its event log; ``ends``: the cycle is ended for it."""
        return HangReported(
            cycle=self.cycle,
            rank=self.rank,
            section=self.verdict.timed,
            iteration=self.verdict.iteration,
            elapsed_s=self.verdict.elapsed_s,
            text=self.text,
            ends=ends,
        )
