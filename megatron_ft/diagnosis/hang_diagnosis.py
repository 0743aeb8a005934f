"""A rank hangs: the evidence of all nodes is collected, within a time limit, and the cause found in it. Pure.

An observe-only diagnosis ends nothing. No collective completes, and evidence was collected without a signal to the
ranks, which go on: the user gets a line that says what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from megatron_ft.diagnosis.cycle_cause import (
    COLLECTIVES,
    LOST_PEER,
    as_verdict,
    describe_interval,
    describe_overdue,
    describe_timeout,
    exited_early,
    undetermined_hang,
)
from megatron_ft.diagnosis.exceptions import connection_loss, is_peer_loss, waited_s
from megatron_ft.diagnosis.hang_messages import Reviewed
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot, place
from megatron_ft.diagnosis.root_cause import RootCause, find, spans
from megatron_ft.link.base.wording import listed
from megatron_ft.link.facts.launcher import Attribution, Cause, CauseKind, FailureClass
from megatron_ft.link.facts.shared import RankHung

_NETWORK_S = 0.3
"""Seconds for the notes to arrive, added to the time in which a node collects its evidence."""
_MOST = 0.5
_SHOWN, _NAMED = 4, 8
_SLACK, _SLACK_S = 0.1, 1.0
"""Share of a timeout, and seconds, by which a rank may have come to its place after others began to wait for it."""


class HangDiagnosis:
    """One per hang. ``asker``: the place of the node that detected it; ``first``: its verdict.

    ``asked``: places of the nodes whose notes are awaited; ``are_all``: whether these are all nodes of the cycle.
    """

    def __init__(
        self,
        first: RankHung,
        asker: int,
        *,
        asked: Iterable[int],
        are_all: bool = True,
        decides: bool = False,
        now_s: float,
    ):
        self.first = first
        self.asker = asker
        self.bound_s = now_s + EVIDENCE_S + _NETWORK_S
        self.decides = decides
        self.awaited = set(asked)
        self._lost: set[int] = set()
        self._are_all = are_all
        self._notes: list[RankSnapshot] = []

    def told(self, place: int, notes: Sequence[RankSnapshot], *, more: bool = False) -> None:
        if place in self.awaited:
            self._notes += notes
            self.awaited -= set() if more else {place}

    def lost(self, place: int) -> None:
        if place in self.awaited:
            self.awaited.discard(place)
            self._lost.add(place)
            self._are_all = False

    @property
    def is_of_lost_peer(self) -> bool:
        """True if begun for a rank that has failed because it had lost another one."""
        return self.first.kind == LOST_PEER

    @property
    def unheard(self) -> list[int]:
        """Places of nodes whose evidence hasn't come."""
        return sorted(self.awaited | self._lost)

    def is_open(self, now_s: float) -> bool:
        """Return True if the cause may still become known."""
        return bool(self.awaited) and now_s < self.bound_s

    def reviewed(self, cycle: int, *, several: bool) -> Reviewed | None:
        """Return the result of an observe-only diagnosis; None if ranks complete, or may, collectives found silent.

        The collectives of a rank that has ended its monitoring and runs on aren't known.
        """
        notes, first = self._notes, self.first
        if first.kind == COLLECTIVES and not self.decides:
            known = (note.collective_s for note in notes if note.collective_s is not None)
            goes_on = any(seconds < _MOST * first.elapsed_s for seconds in known)
            if goes_on or any(note.closing and not (note.gone or note.raised) for note in notes):
                return None
        are_all = self._are_all and not self.awaited
        return review(
            notes, first, cycle=cycle, asker=self.asker, are_all=are_all, several=several, decides=self.decides
        )

    def cause(self, *, several: bool) -> Cause | None:
        """Return the cause that the notes show; None if they show none. ``several`` nodes: the host is named."""
        return blamed(self._notes, self.first, are_all=self._are_all and not self.awaited, several=several)


def blamed(notes: Sequence[RankSnapshot], first: RankHung, *, are_all: bool, several: bool) -> Cause | None:
    """The cause that notes show; None if they hold no evidence. ``are_all``: the notes on all ranks are there."""
    if first.kind == LOST_PEER:
        return _lost_peer(notes, first, are_all=are_all, several=several)
    if not any(note.has_stack or note.state for note in notes):
        return None
    finding = find(notes, elapsed_s=first.elapsed_s, are_all=are_all)
    note = next((note for note in notes if note.rank == finding.rank), None)
    if note is None:
        return undetermined_hang(first, detail=finding.text)
    return _of_one(finding, note, first, several=several)


def _lost_peer(notes: Sequence[RankSnapshot], first: RankHung, *, are_all: bool, several: bool) -> Cause | None:
    """The rank that others have waited for until they failed; None if the notes are all, and show none as missing.

    A rank is accused of another's timeout only if it was late for that long. Where no error tells of a timeout, a
    connection was lost, for which a rank that lives is no cause.
    """
    victims = [note for note in notes if note.raised and is_peer_loss(note.raised)]
    timeout_s = max(waited_s(error) or 0.0 for error in (first.error, *(note.raised for note in victims)))
    finding = find(notes, elapsed_s=timeout_s, are_all=are_all)
    note = next((note for note in notes if note.rank == finding.rank), None)
    if note is None:
        if timeout_s == 0.0 and are_all:
            return _lost_connection(victims, notes, first)
        return undetermined_hang(first, detail=finding.text) if finding.candidates or not are_all else None
    if note.raised and not is_peer_loss(note.raised):
        return _of_one(finding, note, first, several=several)
    # late for that long, or never seen to start; it may have come to its place a moment after the others began to wait
    is_late = note.quiet_s >= timeout_s - min(_SLACK_S, _SLACK * timeout_s) or not (note.state or note.has_stack)
    if not note.gone and not (timeout_s > 0.0 and is_late):
        return _lost_connection(victims, notes, first)
    if is_peer_loss(note.raised):
        return None
    detail = "; ".join(filter(None, (finding.text, f"rank {first.rank} {describe_overdue(first)}")))
    where = f" ({note.host})" if several and note.host else ""
    if note.exitcode == 0:
        return exited_early(note, detail, where=where)
    did = "keeps the others waiting"
    if note.section is not None:
        did += f" in '{note.section}' for {note.open_s:.1f} s"
    if note.is_stopped:
        did += " (process stopped)"
    return Cause(
        kind=CauseKind.HANG,
        text=f"rank {note.rank}{where} {did}",
        rank=note.rank,
        iteration=note.iteration,
        detail=detail,
        host=note.host,
        section=note.section or first.timed,
    )


def _lost_connection(victims: Sequence[RankSnapshot], notes: Sequence[RankSnapshot], first: RankHung) -> Cause:
    """Return the cause that accuses nobody: connections between ranks were lost."""
    ranks = sorted({first.rank, *(note.rank for note in victims)})
    theirs = [note for note in notes if note.rank in ranks]
    names = (name for note in theirs for name in (*(each.name for each in note.in_flight), note.waits_in))
    op = next((f" in {name}" for name in names if name), "")
    *most, last = map(str, ranks) if len(ranks) <= _NAMED else spans(ranks)
    between = f"of rank {last}" if len(ranks) == 1 else f"between ranks {last}"
    if most:
        between = f"between ranks {listed(most)} and {last}"
    hosts = sorted({note.host for note in theirs if note.host})
    ended = next((note.rank for note in notes if note.gone and note.rank not in ranks), None)
    return Cause(
        kind=CauseKind.CRASH,
        text=f"connection lost {between}{op}",
        hosts=tuple(hosts) if len(hosts) > 1 else (),
        iteration=first.iteration,
        detail="no rank had exited before" if ended is None else f"rank {ended} had exited",
        attribution=Attribution(kind=FailureClass.NETWORK, sign=connection_loss(first.error)),
    )


def _of_one(finding: RootCause, note: RankSnapshot, first: RankHung, *, several: bool) -> Cause:
    verdict = as_verdict(note, first)
    where = f" ({note.host})" if several and note.host else ""
    if note.gone and note.exitcode == 0:
        return exited_early(note, finding.text, where=where)
    did = "keeps the others waiting" if note.gone else describe_overdue(verdict)
    kind = CauseKind.HANG
    if note.raised:  # it would be a crash, if only it ended
        did, kind = f"raised {note.raised}", CauseKind.CRASH
    return Cause(
        kind=kind,
        text=f"rank {note.rank}{where} {did}",
        rank=note.rank,
        iteration=verdict.iteration,
        detail=finding.text,
        host=note.host,
        section=verdict.timed if kind is CauseKind.HANG else "",
    )


def review(
    notes: Sequence[RankSnapshot],
    first: RankHung,
    *,
    cycle: int,
    asker: int,
    are_all: bool,
    several: bool,
    decides: bool = False,
) -> Reviewed:
    """Describe what keeps the ranks of an observe-only diagnosis: silent collectives, or an overdue interval.

    Args:
        asker: place of the node that found it first.
        several: there are several nodes.
        decides: name the ranks that are to be terminated while those that wait for them go on.
    """
    finding = find(notes, elapsed_s=first.elapsed_s, are_all=are_all) if notes else RootCause(rank=None)
    is_interval = first.kind != COLLECTIVES and not decides
    rank = first.rank if finding.rank is None and is_interval else finding.rank
    note = next((note for note in notes if note.rank == rank), None)
    verdict = first if note is None or (note.gone and decides) else as_verdict(note, first)
    facts = [note.host] if several and note is not None and note.host else []
    is_waited, text = any(note.in_flight or note.waits_in for note in notes), finding.text
    if is_interval:
        text = f"{describe_interval(verdict)} ({describe_timeout(first)})"
        text = ", ".join(filter(None, (text, finding.text)))
    elif not decides and not is_waited:
        places = [f"rank {note.rank} {place(note)}".rstrip() for note in notes]
        text = f"no rank waits in a collective: {listed(places, most=_SHOWN, joint='; ')}"
        rank = note = None
    elif note is not None and note.is_stopped and not decides:
        facts += ["process stopped"]
    if is_interval or note is not None:
        text = f"rank {rank}" + (f" ({', '.join(facts)})" if facts else "") + f" {text}"
    found = Reviewed(cycle, asker, first, text, rank, is_waited)
    if not decides:
        return found
    hanging = finding.candidates if note is None else () if note.gone else (note.rank,)  # for an exited rank all wait
    progress = next((f"rank {each.rank} {each.progress}" for each in notes if each.progress), "")
    return replace(found, verdict=verdict, decides=True, hanging=hanging, progress=progress)
