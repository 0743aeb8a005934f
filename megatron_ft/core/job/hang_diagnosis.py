"""A rank hangs: the evidence of all nodes is collected, within a time limit, and the cause found in it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from megatron_ft.core.diagnosis.cycle_cause import (
    Cause,
    CauseKind,
    HangVerdict,
    RankView,
    as_verdict,
    describe_overdue,
    undetermined_hang,
)
from megatron_ft.core.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot
from megatron_ft.core.diagnosis.root_cause import Finding, find
from megatron_ft.core.job.hang_messages import Reviewed
from megatron_ft.core.job.progress import Reached
from megatron_ft.core.job.review import goes_on, review

__all__ = ["HangDiagnosis", "blamed"]

_NETWORK_S = 0.3
"""Seconds for the notes to arrive, added to the time in which a node collects its evidence."""


class HangDiagnosis:
    """One per hang. ``asker``: the place of the node that detected it; ``first``: its verdict.

    ``asked``: places of the nodes whose notes are awaited; ``are_all``: whether these are all nodes of the cycle.
    """

    def __init__(
        self,
        first: HangVerdict,
        reached: Reached | None,
        asker: int,
        *,
        asked: Iterable[int],
        are_all: bool = True,
        now_s: float,
    ):
        self.first = first
        self.reached = reached
        self.asker = asker
        self.bound_s = now_s + EVIDENCE_S + _NETWORK_S
        self._awaited = set(asked)
        self._are_all = are_all
        self._notes: list[RankSnapshot] = []
        self._found: tuple[Cause | None] | None = None

    def told(self, place: int, notes: Sequence[RankSnapshot], *, more: bool = False) -> None:
        """Notes of one node have arrived; ``more``: others of it follow."""
        if place not in self._awaited:
            return
        self._notes += notes
        if not more:
            self._awaited.discard(place)

    def awaits(self, place: int) -> bool:
        """Whether notes of that node are yet to come."""
        return place in self._awaited

    def lost(self, place: int) -> None:
        """That node is lost: its notes won't come."""
        if place in self._awaited:
            self._awaited.discard(place)
            self._are_all = False

    def is_open(self, now_s: float) -> bool:
        """Whether the cause may still become known."""
        return bool(self._awaited) and now_s < self.bound_s

    def reviewed(self, cycle: int, *, several: bool) -> Reviewed | None:
        """The result of an observe-only diagnosis; None if some ranks still complete collectives."""
        if goes_on(self._notes, self.first):
            return None
        are_all = self._are_all and not self._awaited
        return review(self._notes, self.first, cycle=cycle, asker=self.asker, are_all=are_all, several=several)

    def cause(self, *, several: bool) -> Cause | None:
        """The cause that the notes show; None if they show none. ``several`` nodes: the host is named."""
        if self._found is None:
            are_all = self._are_all and not self._awaited
            self._found = (blamed(self._notes, self.first, are_all=are_all, several=several),)
        return self._found[0]


def blamed(notes: Sequence[RankSnapshot], first: HangVerdict, *, are_all: bool, several: bool) -> Cause | None:
    """The cause that notes show; None if they hold no evidence. ``are_all``: the notes on all ranks are there."""
    if not any(note.has_stack or note.state for note in notes):
        return None
    finding = find(notes, elapsed_s=first.elapsed_s, are_all=are_all)
    if finding.rank is None:
        return undetermined_hang(first, detail=finding.text)
    note = next(note for note in notes if note.rank == finding.rank)
    return _of_one(finding, note, first, several=several)


def _of_one(finding: Finding, note: RankSnapshot, first: HangVerdict, *, several: bool) -> Cause:
    verdict = first if note.rank == first.rank else as_verdict(_view(note, first.at_ns), first)
    verdict = dataclasses.replace(verdict, stopped=note.is_stopped)
    where = f" ({note.host})" if several and note.host else ""
    did = "keeps the others waiting" if note.gone else describe_overdue(verdict)
    kind = CauseKind.HANG
    if note.raised:  # it would be a crash, if only it ended
        did, kind = f"raised {note.raised}", CauseKind.CRASH
    text = f"rank {note.rank}{where} {did}"
    return Cause(kind=kind, text=text, rank=note.rank, iteration=verdict.iteration, detail=finding.text, host=note.host)


def _view(note: RankSnapshot, at_ns: int) -> RankView:
    """A note as the view of a rank that another rank's verdict, of ``at_ns``, is applied to."""
    return RankView(
        rank=note.rank,
        local_rank=note.local_rank,
        stopped=note.is_stopped,
        iteration=note.iteration,
        section=note.section,
        since_ns=at_ns - round(note.open_s * 1e9),
        timeout_s=note.timeout_s,
        closing=note.closing,
    )
