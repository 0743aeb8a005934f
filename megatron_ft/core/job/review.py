"""No collective completes: what the notes on all ranks show, for the user. Pure.

Unlike a diagnosis (`core.job.hang_diagnosis`) this ends nothing: evidence was collected without a signal to the ranks,
which go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ft.core.diagnosis.cycle_cause import HangVerdict
from megatron_ft.core.diagnosis.rank_snapshot import RankSnapshot, place
from megatron_ft.core.diagnosis.root_cause import find
from megatron_ft.core.job.hang_messages import Reviewed
from megatron_ft.core.wording import listed

__all__ = ["goes_on", "review"]

_MOST = 0.5
_SHOWN = 4


def goes_on(notes: Sequence[RankSnapshot], first: HangVerdict) -> bool:
    """Whether some rank has begun or completed a collective for less than half of that time."""
    known = (note.collective_s for note in notes if note.collective_s is not None)
    return any(seconds < _MOST * first.elapsed_s for seconds in known)


def review(
    notes: Sequence[RankSnapshot], first: HangVerdict, *, cycle: int, asker: int, are_all: bool, several: bool
) -> Reviewed:
    """What to say. ``asker``: the place of the node that found it first; ``several``: there are several nodes."""
    is_waited = any(note.in_flight or note.waits_in for note in notes)
    finding = find(notes, elapsed_s=first.elapsed_s, are_all=are_all)
    rank, text = finding.rank, finding.text
    if not is_waited:
        rank, text = None, _nobody_waits(notes)
    elif rank is not None:
        note = next(note for note in notes if note.rank == rank)
        facts = [note.host] if several and note.host else []
        facts += ["process stopped"] if note.is_stopped else []
        text = f"rank {rank}" + (f" ({', '.join(facts)})" if facts else "") + f" {finding.text}"
    return Reviewed(
        cycle=cycle,
        asker=asker,
        elapsed_s=first.elapsed_s,
        timeout_s=first.timeout_s,
        text=text,
        rank=rank,
        is_waited=is_waited,
    )


def _nobody_waits(notes: Sequence[RankSnapshot]) -> str:
    places = [f"rank {note.rank} {place(note)}".rstrip() for note in notes]
    return f"no rank waits in a collective: {listed(places, most=_SHOWN, joint='; ')}"
