"""The cause of a hang in the evidence of all nodes, and what an observe-only diagnosis tells the user. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot, place
from megatron_ft.diagnosis.root_cause import RootCause, find, spans
from megatron_ft.link.base.wording import listed
from megatron_ft.link.facts.launcher import Attribution, Cause, CauseKind, FailureClass
from megatron_ft.link.facts.shared import RankHung

_MOST = 0.5
_SHOWN, _NAMED = 4, 8
_SLACK, _SLACK_S = 0.1, 1.0
"""Share of a timeout, and seconds, by which a rank may have come to its place after others began to wait for it."""


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
    # late for that long, or never seen to start; it may have come to its place a moment after the others began to wait
    is_late = note.quiet_s >= timeout_s - min(_SLACK_S, _SLACK * timeout_s) or not (note.state or note.has_stack)
    has_followed = is_peer_loss(note.raised)
    if not (note.gone or (note.raised and not has_followed) or (timeout_s > 0.0 and is_late)):
        return _lost_connection(victims, notes, first)
    return None if has_followed else _of_one(finding, note, first, several=several)


def _lost_connection(victims: Sequence[RankSnapshot], notes: Sequence[RankSnapshot], first: RankHung) -> Cause:
    """Return the cause that accuses nobody: connections between ranks were lost."""
    ranks = sorted({first.rank, *(note.rank for note in victims)})
    theirs = [note for note in notes if note.rank in ranks]
    names = (name for note in theirs for name in (*(each.name for each in note.in_flight), note.waits_in))
    op = next((f" in {name}" for name in names if name), "")
    *most, last = map(str, ranks) if len(ranks) <= _NAMED else spans(ranks)
    both = " and ".join(filter(None, (listed(most), last)))
    between = f"of rank {last}" if len(ranks) == 1 else f"between ranks {both}"
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
    """Return the cause that accuses this rank: it hangs, has ended, or ends of its own exception."""
    verdict, detail, kind = as_verdict(note, first), finding.text, CauseKind.HANG
    where = f" ({note.host})" if several and note.host else ""
    is_waited_for = first.kind == LOST_PEER and not note.raised
    if is_waited_for:
        detail = "; ".join(filter(None, (detail, f"rank {first.rank} {describe_overdue(first)}")))
    if note.gone and note.exitcode == 0:
        return exited_early(note, detail, where=where)
    if note.raised:  # it would be a crash, if only it ended
        did, kind = f"raised {note.raised}", CauseKind.CRASH
    elif is_waited_for or note.gone:
        did = "keeps the others waiting"
        if is_waited_for:
            did += "" if note.section is None else f" in '{note.section}' for {note.open_s:.1f} s"
            did += " (process stopped)" if note.is_stopped else ""
    else:
        did = describe_overdue(verdict)
    return Cause(
        kind=kind,
        text=f"rank {note.rank}{where} {did}",
        rank=note.rank,
        iteration=verdict.iteration,
        detail=detail,
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
) -> Reviewed | None:
    """Describe what keeps the ranks of an observe-only diagnosis: silent collectives, or an overdue interval.

    None if ranks complete, or may, the collectives that were found silent: those of a rank that has ended its
    monitoring and runs on aren't known.

    Args:
        asker: place of the node that found it first.
        several: there are several nodes.
        decides: name the ranks that are to be terminated while those that wait for them go on.
    """
    if first.kind == COLLECTIVES and not decides:
        known = (note.collective_s for note in notes if note.collective_s is not None)
        goes_on = any(seconds < _MOST * first.elapsed_s for seconds in known)
        if goes_on or any(note.closing and not (note.gone or note.raised) for note in notes):
            return None
    finding = find(notes, elapsed_s=first.elapsed_s, are_all=are_all) if notes else RootCause(rank=None)
    is_interval = first.kind != COLLECTIVES and not decides
    is_waited, text = any(note.in_flight or note.waits_in for note in notes), finding.text
    if not (is_interval or decides or is_waited):
        places = [f"rank {note.rank} {place(note)}".rstrip() for note in notes]
        text = f"no rank waits in a collective: {listed(places, most=_SHOWN, joint='; ')}"
        return Reviewed(cycle, asker, first, text)
    rank = first.rank if finding.rank is None and is_interval else finding.rank
    note = next((note for note in notes if note.rank == rank), None)
    verdict = first if note is None or (note.gone and decides) else as_verdict(note, first)
    if is_interval:
        text = ", ".join(filter(None, (f"{describe_interval(verdict)} ({describe_timeout(first)})", text)))
    if rank is not None:
        facts = [note.host] if several and note is not None and note.host else []
        if note is not None and note.is_stopped and not (is_interval or decides):
            facts += ["process stopped"]
        text = f"rank {rank}" + (f" ({', '.join(facts)})" if facts else "") + f" {text}"
    if not decides:
        return Reviewed(cycle, asker, first, text, rank, is_waited)
    hanging = finding.candidates if note is None else () if note.gone else (note.rank,)  # for an exited rank all wait
    progress = next((f"rank {each.rank} {each.progress}" for each in notes if each.progress), "")
    return Reviewed(cycle, asker, verdict, text, rank, is_waited, decides=True, hanging=hanging, progress=progress)
