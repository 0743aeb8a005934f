"""Root cause of a hang: which ranks hang, and which only wait for them, by the snapshots of all ranks. Pure.

A rank waits for the members of its collective's group that haven't entered it. A rank that is waited for and doesn't
wait is the cause. If all wait for each other (two ranks went different ways), the cause is the one rank without whose
wait all others would be explained. A wrong accusation is worse than none: if several remain, all are named as
candidates, and none as the cause.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collective
from megatron_ft.diagnosis.exceptions import is_peer_loss
from megatron_ft.diagnosis.rank_snapshot import RankSnapshot, place

Waits = Mapping[int, frozenset[int]]
"""Rank -> ranks it waits for; empty for a rank that doesn't wait."""

_MOST = 0.5
"""A cause hasn't moved for at least this share of the overdue rank's time."""
_ALIKE, _ALIKE_S = 0.1, 0.25
"""A rank counts as stuck like the overdue one if its own timeout is due within `_ALIKE` of that one's time, or within
`_ALIKE_S` seconds: ranks reach the same line some milliseconds apart, while steps and pauses differ by more."""
_SHOWN = 4
_MOST_CANDIDATES = 64
_MOST_SPANS = 32
_NONE: frozenset[int] = frozenset()


class RootCause(NamedTuple):
    """Result of the diagnosis.

    Args:
        rank: the cause; None if undetermined.
        text: place of the cause, and what the others do: "in loader.py:88 next_batch; 7 others wait in all_reduce".
        candidates: ranks among which the snapshots don't decide; empty if ``rank`` is known.
    """

    rank: int | None
    text: str = ""
    candidates: tuple[int, ...] = ()


def find(notes: Sequence[RankSnapshot], *, elapsed_s: float, are_all: bool = True) -> RootCause:
    """Find the cause. ``elapsed_s``: overdue time of the first hung rank; ``are_all``: no snapshot is missing."""
    notes = _in_ranks_of_the_job(notes)
    waits = waits_for(notes)
    is_alone = len(notes) == 1 and are_all
    suspects, is_certain = ({notes[0].rank}, True) if is_alone else _suspects(notes, waits, elapsed_s, are_all=are_all)
    by_rank = {note.rank: note for note in notes}
    if not (len(suspects) == 1 and is_certain):
        # an exception that is being handled may be harmless: it decides only where nothing else does
        raising = {note.rank for note in notes if note.handling and not is_peer_loss(note.handling)}
        raising &= suspects or raising
        suspects, is_certain = (raising, True) if len(raising) == 1 else (suspects, is_certain)
    if len(suspects) == 1 and is_certain:
        (rank,) = suspects
        waiting = [by_rank[each] for each in sorted(waits) if waits[each] and each != rank]
        text = place(by_rank[rank])
        if waiting:  # "7 others wait in all_reduce"
            ops = Counter(note.in_flight[0].name if note.in_flight else note.waits_in or note.inner for note in waiting)
            who = f"rank {waiting[0].rank} waits" if len(waiting) == 1 else f"{len(waiting)} others wait"
            more = " and other collectives" if len(ops) > 1 else ""
            text = "; ".join(filter(None, (text, f"{who} in {ops.most_common(1)[0][0]}{more}")))
        return RootCause(rank, text)
    named = sorted(suspects or {note.rank for note in notes if _is_stuck(note, elapsed_s)})
    # exceptions of ranks whose places aren't told, without those that only say that a peer was lost
    raised = ((note.rank, note.raised or note.handling) for note in notes if note.rank not in named[:_SHOWN])
    own = [f"; rank {rank} raised {error}" for rank, error in raised if error and not is_peer_loss(error)]
    return RootCause(None, _undecided(named, by_rank) + "".join(own[:_SHOWN]), tuple(named))


def _in_ranks_of_the_job(notes: Sequence[RankSnapshot]) -> Sequence[RankSnapshot]:
    """Return the snapshots with groups of collectives in ranks of the job, not in numbers ranks gave themselves."""
    if all(note.own_rank is None for note in notes):
        return notes
    numbers = {note.rank: note.rank for note in notes}
    numbers |= {note.own_rank: note.rank for note in notes if note.own_rank is not None}
    group = functools.cache(lambda ranks: tuple(numbers.get(rank, rank) for rank in ranks))
    return [
        replace(note, in_flight=tuple(replace(each, ranks=group(each.ranks)) for each in note.in_flight))
        for note in notes
    ]


def waits_for(notes: Iterable[RankSnapshot]) -> dict[int, frozenset[int]]:
    """Return the ranks that each rank waits for, by its collectives, or, if it couldn't report them, by its stack.

    Ranks without a snapshot may be among them, if no other rank is missing.
    """
    by_rank = {note.rank: note for note in notes}
    mute = frozenset(rank for rank, note in by_rank.items() if _is_mute(note))
    unseen = frozenset(rank for rank, note in by_rank.items() if _is_unseen(note))
    unseen = unseen or (mute if len(mute) == 1 else _NONE)  # several may wait for each other
    outside = frozenset(
        rank for rank, note in by_rank.items() if not (note.in_flight or note.seems_to_wait or _may_wait(note))
    )
    found: dict[tuple[str, int, str, Sequence[int]], frozenset[int]] = {}

    def missing_from(collective: Collective, rank: int) -> frozenset[int]:
        """Return the members missing from this collective of a rank; if none, those of unknown state."""
        if collective.p2p:
            peer = collective.peer
            theirs = by_rank[peer].in_flight if peer in by_rank else ()
            is_met = any(each.p2p and each.peer == rank for each in theirs)
            return _NONE if peer is None or is_met else frozenset((peer,))
        key = (collective.key, collective.seq, collective.op, collective.ranks)
        missing = found.get(key)
        if missing is None:
            members = frozenset(collective.ranks or by_rank)
            known = members & by_rank.keys()
            missing = frozenset(each for each in known if _is_missing(by_rank[each], collective))
            missing = found[key] = missing or members - known or members & unseen
        return missing

    unions: dict[tuple[frozenset[int], ...], frozenset[int]] = {}
    waits = {}
    for rank, note in by_rank.items():
        if note.gone or note.is_stopped or note.raised:
            missing = _NONE
        elif note.in_flight:
            sets = tuple(missing_from(each, rank) for each in note.in_flight)
            missing = unions.get(sets) or unions.setdefault(sets, frozenset().union(*sets))
        else:
            missing = (outside or unseen) if note.seems_to_wait else _NONE
        # thousands of ranks that wait for the same ranks share one set
        waits[rank] = missing - {rank} if rank in missing else missing
    return waits


def _is_missing(other: RankSnapshot, collective: Collective) -> bool:
    if other.gone or other.raised:
        return True
    if not other.has_collectives:
        return not (other.waits_in or _may_wait(other))
    key = (collective.key, collective.seq)
    same = [each for each in other.in_flight if not each.p2p and (each.key, each.seq) == key]
    if same:
        return all(each.op != collective.op for each in same)
    return other.enqueued.get(collective.key, 0) < collective.seq


def _may_wait(note: RankSnapshot) -> bool:
    """Return True if a rank without reported collectives may be in one: its innermost call allows it, or is unknown."""
    if note.gone or note.is_stopped or note.has_collectives or (note.closing and note.has_stack):
        return False  # a rank that has ended its monitoring has left the loop in which the others wait
    return not note.has_stack or note.is_in_library


def _is_unseen(note: RankSnapshot) -> bool:
    """Return True if it is only known that the rank was found hung: its monitor ended it before collecting more."""
    return note.found_hung and not (note.state or note.has_stack) and _may_wait(note)


def _is_mute(note: RankSnapshot) -> bool:
    """Return True if a rank lives and doesn't answer: it holds the GIL, or has no thread that could."""
    return bool(note.state) and not (note.has_stack or note.has_collectives or note.gone or note.closing)


def _suspects(notes: Sequence[RankSnapshot], waits: Waits, elapsed_s: float, *, are_all: bool) -> tuple[set[int], bool]:
    """Return the possible causes (none if the snapshots show nothing), and whether a single one is certain."""
    held = {note.rank for note in notes if note.is_stopped or note.is_stuck_in_kernel}
    if held:
        return held, True
    raised = [note for note in notes if note.raised and not is_peer_loss(note.raised)]
    if raised:
        return {min(raised, key=lambda note: (-note.raised_s, note.rank)).rank}, True
    bereft = {note.rank for note in notes if note.lost and note.waits_for_process and _is_still(note, elapsed_s)}
    if bereft:
        return bereft, True
    waited_for = frozenset().union(*{id(others): others for others in waits.values()}.values())
    victims = {note.rank for note in notes if note.raised}
    if victims:  # which ranks neither failed because they had lost a peer, nor wait? One that has left is missing, too
        others = [note for note in notes if note.rank not in victims and not waits.get(note.rank)]
        missing = [note for note in others if note.gone or note.is_stopped or not _is_waiting(note)]
        idle = [note for note in missing if note.exitcode == 0 or note.is_stopped or not note.is_busy]
        away = {note.rank for note in idle or missing}
        if away:
            return away & waited_for or away, are_all
    if not waited_for:
        return _overdue(notes, elapsed_s), True
    roots = {rank for rank in waited_for if not waits.get(rank)}
    if not roots:
        return _explanations(waits), True
    known = [note for note in notes if note.rank in roots]
    if roots - waits.keys():
        return roots, False
    if all(note.raised for note in known):
        return set(), False  # a rank that raised because it lost a peer isn't the cause
    return (roots, False) if any(_is_mute(note) for note in known) else _narrowed(known, elapsed_s)


def _explanations(waits: Waits) -> set[int]:
    """Return, if all wait for each other, the ranks without whose wait that of every other rank would be explained:
    all ranks wait for them in the end, and no circle is left."""
    waiting = [rank for rank, others in waits.items() if others]
    # the first rank whose wait is explained by one rank waits for that one alone
    candidates = {next(iter(waits[rank])) for rank in waiting if len(waits[rank]) == 1} if len(waiting) > 1 else waiting
    if len(candidates) > _MOST_CANDIDATES:
        return set(candidates)  # a circle that large has no single cause
    alike: dict[frozenset[int], set[int]] = {}  # few sets even for thousands of ranks
    for rank in waiting:
        alike.setdefault(waits[rank], set()).add(rank)
    found = set()
    for rank in candidates:
        left = {others: ranks for others, ranks in alike.items() if ranks != {rank}}
        done = {rank}
        while freed := [others for others in left if others <= done]:
            done.update(*map(left.pop, freed))
        if waits.get(rank) and not left:
            found.add(rank)
    return found


def _narrowed(roots: Sequence[RankSnapshot], elapsed_s: float) -> tuple[set[int], bool]:
    """Narrow several awaited ranks to those that haven't moved for long, then to those an iteration behind.

    The result is uncertain if all have moved a moment ago, even if there is only one.
    """
    still = [note for note in roots if note.gone or note.found_hung or _is_still(note, elapsed_s)]
    if not still:
        return {note.rank for note in roots}, False
    iterations = [note.iteration for note in still if note.iteration is not None]
    if len(iterations) == len(still):
        still = [note for note in still if note.iteration == min(iterations)]
    return {note.rank for note in still}, True


def _overdue(notes: Sequence[RankSnapshot], elapsed_s: float) -> set[int]:
    """Return the stuck ranks if no rank is seen to wait, unless a rank has been an iteration behind for most of the
    time."""
    hung = [note for note in notes if _is_stuck(note, elapsed_s)]
    known = [note.iteration for note in hung if note.iteration is not None]
    if known:
        behind = [
            note
            for note in notes
            if note.iteration is not None
            and note.iteration < min(known)
            and _is_still(note, elapsed_s)
            and not (note.closing or note.gone)
        ]
        if behind:
            return {note.rank for note in behind if note.iteration == min(n.iteration or 0 for n in behind)}
        hung = [note for note in hung if note.iteration in (None, min(known))]
    # a rank that waits in a complete collective isn't the cause
    stuck = {note.rank for note in hung if not _is_waiting(note)}
    if any(_is_unseen(note) for note in hung):
        # before it ended, that rank may have waited for one that is outside, overdue or not
        others = (note for note in notes if not (_is_waiting(note) or note.closing or note.gone))
        stuck |= {note.rank for note in others if _is_still(note, elapsed_s)}
    return stuck


def _is_waiting(note: RankSnapshot) -> bool:
    return bool(note.in_flight) or note.seems_to_wait


def _is_still(note: RankSnapshot, elapsed_s: float) -> bool:
    """Return True if a rank hasn't moved for most of the overdue rank's time."""
    return note.quiet_s >= _MOST * elapsed_s


def _is_stuck(note: RankSnapshot, elapsed_s: float) -> bool:
    """Return True if a rank was found hung, or is about to be: which monitor was first is chance."""
    if note.found_hung:
        return True
    is_due = note.left_s is not None and note.left_s <= max(_ALIKE * elapsed_s, _ALIKE_S)
    return is_due and _is_still(note, elapsed_s) and not (note.closing or note.gone)


def _undecided(ranks: Sequence[int], by_rank: Mapping[int, RankSnapshot]) -> str:
    """Return the candidates and their places, if there are any."""
    if not ranks:
        return "root cause undetermined"
    places = {rank: place(by_rank[rank]) if rank in by_rank else "(no evidence received)" for rank in ranks[:_SHOWN]}
    candidates = "; ".join(f"rank {rank} {where}" for rank, where in places.items())
    joined = spans(ranks)
    rest = f", and more ({len(ranks)} in all)" if len(joined) > _MOST_SPANS else ""
    more = f"; all candidates: ranks {', '.join(joined[:_MOST_SPANS])}{rest}" if len(ranks) > _SHOWN else ""
    return f"root cause undetermined; candidates: {candidates}{more}"


def spans(ranks: Sequence[int]) -> list[str]:
    """Return ascending ranks with consecutive ones joined: "0-7", "9"."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1] = [found[-1][0], rank]
        else:
            found.append([rank])
    return ["-".join(map(str, span)) for span in found]
