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
    describe_overdue,
    exited_early,
    undetermined_hang,
)
from megatron_ft.diagnosis.exceptions import connection_loss, is_peer_loss, waited_s
from megatron_ft.diagnosis.hang_messages import Reviewed
from megatron_ft.diagnosis.rank_snapshot import EVIDENCE_S, RankSnapshot, place
from megatron_ft.diagnosis.root_cause import RootCause, find, spans
from megatron_ft.link.base.wording import listed, when
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
        self._awaited = set(asked)
        self._lost: set[int] = set()
        self._are_all = are_all
        self.decides = decides
        self._notes: list[RankSnapshot] = []
        self._found: tuple[Cause | None] | None = None

    def told(self, place: int, notes: Sequence[RankSnapshot], *, more: bool = False) -> None:
        if place not in self._awaited:
            return
        self._notes += notes
        if not more:
            self._awaited.discard(place)

    @property
    def is_of_lost_peer(self) -> bool:
        """True if begun for a rank that has failed because it had lost another one."""
        return self.first.kind == LOST_PEER

    def awaits(self, place: int) -> bool:
        return place in self._awaited

    def lost(self, place: int) -> None:
        if place in self._awaited:
            self._awaited.discard(place)
            self._lost.add(place)
            self._are_all = False

    @property
    def unheard(self) -> list[int]:
        """Places of nodes whose evidence hasn't come."""
        return sorted(self._awaited | self._lost)

    def is_open(self, now_s: float) -> bool:
        """Return True if the cause may still become known."""
        return bool(self._awaited) and now_s < self.bound_s

    def reviewed(self, cycle: int, *, several: bool) -> Reviewed | None:
        """Return the result of an observe-only diagnosis; None if ranks complete, or may, collectives found silent."""
        is_silence = self.first.kind == COLLECTIVES and not self.decides
        if is_silence and (goes_on(self._notes, self.first) or has_left_monitoring(self._notes)):
            return None
        return review(
            self._notes,
            self.first,
            cycle=cycle,
            asker=self.asker,
            are_all=self._has_all,
            several=several,
            decides=self.decides,
        )

    def cause(self, *, several: bool) -> Cause | None:
        """The cause that the notes show; None if they show none. ``several`` nodes: the host is named."""
        if self._found is None:
            self._found = (blamed(self._notes, self.first, are_all=self._has_all, several=several),)
        return self._found[0]

    @property
    def _has_all(self) -> bool:
        """True if the notes on all ranks of the cycle have come."""
        return self._are_all and not self._awaited


def blamed(notes: Sequence[RankSnapshot], first: RankHung, *, are_all: bool, several: bool) -> Cause | None:
    """The cause that notes show; None if they hold no evidence. ``are_all``: the notes on all ranks are there."""
    if first.kind == LOST_PEER:
        return _lost_peer(notes, first, are_all=are_all, several=several)
    if not any(note.has_stack or note.state for note in notes):
        return None
    finding = find(notes, elapsed_s=first.elapsed_s, are_all=are_all)
    if finding.rank is None:
        return undetermined_hang(first, detail=finding.text)
    note = next(note for note in notes if note.rank == finding.rank)
    return _of_one(finding, note, first, several=several)


def _lost_peer(notes: Sequence[RankSnapshot], first: RankHung, *, are_all: bool, several: bool) -> Cause | None:
    """The rank that others have waited for until they failed; None if the notes are all, and show none as missing.

    A rank is accused of another's timeout only if it was late for that long. Where no error tells of a timeout, a
    connection was lost, for which a rank that lives is no cause.
    """
    victims = [note for note in notes if note.raised and is_peer_loss(note.raised)]
    timeout_s = max(
        (waited_s(error) or 0.0 for error in (first.error, *(note.raised for note in victims))), default=0.0
    )
    finding = find(notes, elapsed_s=timeout_s, are_all=are_all)
    if finding.rank is None:
        if timeout_s == 0.0 and are_all:
            return _lost_connection(victims, notes, first)
        return undetermined_hang(first, detail=finding.text) if finding.candidates or not are_all else None
    note = next(note for note in notes if note.rank == finding.rank)
    if note.raised and not is_peer_loss(note.raised):
        return _of_one(finding, note, first, several=several)
    if not note.gone and not _was_late(note, timeout_s):
        return _lost_connection(victims, notes, first)
    if is_peer_loss(note.raised):
        return None
    where = f" ({note.host})" if several and note.host else ""
    consequence = f"rank {first.rank} {describe_overdue(first)}"
    if note.exitcode == 0:
        return _exited_early(note, finding, where, consequence)
    did = "keeps the others waiting"
    if note.section is not None:
        did = f"keeps the others waiting in '{note.section}' for {note.open_s:.1f} s"
    if note.is_stopped:
        did += " (process stopped)"
    detail = "; ".join(filter(None, (finding.text, consequence)))
    return Cause(
        kind=CauseKind.HANG,
        text=f"rank {note.rank}{where} {did}",
        rank=note.rank,
        iteration=note.iteration,
        detail=detail,
        host=note.host,
        section=note.section or first.timed,
    )


def _exited_early(note: RankSnapshot, finding: RootCause, where: str, consequence: str = "") -> Cause:
    others = finding.text.removeprefix("has exited with 0").removeprefix("; ")
    found = exited_early(note, "; ".join(filter(None, (others, consequence))), where=where)
    return replace(found, host=note.host)


def _was_late(note: RankSnapshot, timeout_s: float) -> bool:
    """Return True if a rank hasn't moved for as long as others have waited for it, or was never seen to start.

    It may have come to its place a moment after the others began to wait.
    """
    is_unseen = not (note.state or note.has_stack)
    return timeout_s > 0.0 and (is_unseen or note.quiet_s >= timeout_s - min(_SLACK_S, _SLACK * timeout_s))


def _lost_connection(victims: Sequence[RankSnapshot], notes: Sequence[RankSnapshot], first: RankHung) -> Cause:
    """Return the cause that accuses nobody: connections between ranks were lost."""
    ranks = sorted({first.rank, *(note.rank for note in victims)})
    names = [
        name
        for note in notes
        if note.rank in ranks
        for name in (*(each.name for each in note.in_flight), note.waits_in)
    ]
    op = next((f" in {name}" for name in names if name), "")
    *most, last = map(str, ranks) if len(ranks) <= _NAMED else spans(ranks)
    between = f"of rank {last}" if len(ranks) == 1 else f"between ranks {last}"
    if most:
        between = f"between ranks {listed(most)} and {last}"
    hosts = sorted({note.host for note in notes if note.rank in ranks and note.host})
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
        return _exited_early(note, finding, where)
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


def goes_on(notes: Sequence[RankSnapshot], first: RankHung) -> bool:
    """Return True if some rank has begun or completed a collective for less than half of that time."""
    known = (note.collective_s for note in notes if note.collective_s is not None)
    return any(seconds < _MOST * first.elapsed_s for seconds in known)


def has_left_monitoring(notes: Sequence[RankSnapshot]) -> bool:
    """Return True if a running rank has ended its monitoring, not with an exception: its collectives aren't known."""
    return any(note.closing and not (note.gone or note.raised) for note in notes)


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
    found = Reviewed(
        cycle=cycle,
        asker=asker,
        elapsed_s=first.elapsed_s,
        timeout_s=first.timeout_s,
        text=finding.text,
        rank=rank,
        is_waited=any(note.in_flight or note.waits_in for note in notes),
    )
    if is_interval:
        what = f"in '{verdict.section}'" if verdict.section is not None else verdict.kind.replace("_", " ")
        what += f" for {verdict.elapsed_s:.1f} s" + ("" if verdict.iteration is None else f" {when(verdict.iteration)}")
        text = ", ".join(filter(None, (f"{what} (learned timeout {first.timeout_s:.4g} s)", finding.text)))
        return replace(found, text=_told(rank, facts, text), timed=first.timed, iteration=first.iteration)
    if not decides and not found.is_waited:
        places = [f"rank {note.rank} {place(note)}".rstrip() for note in notes]
        text = f"no rank waits in a collective: {listed(places, most=_SHOWN, joint='; ')}"
        return replace(found, rank=None, text=text)
    if note is not None:
        facts += ["process stopped"] if note.is_stopped and not decides else []
        found = replace(found, text=_told(rank, facts, finding.text))
    if not decides:
        return found
    hanging = finding.candidates if note is None else () if note.gone else (note.rank,)  # for an exited rank all wait
    return replace(
        found,
        elapsed_s=verdict.elapsed_s,
        timeout_s=verdict.timeout_s,
        progress=next((f"rank {each.rank} {each.progress}" for each in notes if each.progress), ""),
        iteration=verdict.iteration,
        decides=True,
        hanging=hanging,
        kind=verdict.kind,
        section=verdict.section,
    )


def _told(rank: int | None, facts: Sequence[str], text: str) -> str:
    return f"rank {rank}" + (f" ({', '.join(facts)})" if facts else "") + f" {text}"
