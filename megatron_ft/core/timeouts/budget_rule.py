"""The rule `budget` for learned timeouts: a budget of false kills instead of a factor. Pure; see `docs/timeouts.md`.

The timeout is the length that one interval in ``1 / budget`` is expected to exceed, estimated from the tail of all
intervals seen, with room for longer ones. It is at most 0.8 of what the reference's rule has given on average, unless
longer intervals were seen more than once: then it is 1.25 times the longest of those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_ft.core.timeouts import early
from megatron_ft.core.timeouts.early import Early
from megatron_ft.core.timeouts.reference_rule import calculate_timeout
from megatron_ft.core.timeouts.tail import HALF_LIFE, Tail, length_of

DEFAULT_BUDGET = 1e-6
FIRST_INTERVALS = 4
"""This many intervals of a section are the first of a cycle: compilation, allocation, files that aren't cached."""
_ROOM = 4.0
_COMMON = 0.999
_ROOM_ABOVE_SEEN = 1.25
_SEEN_TWICE = 1.5
"""Counts decay: an interval that was seen twice may count a little less than 2."""
_SEEN_ONCE = 0.5
_FEW = 12.0
"""Fewer say too little beside the first ones: then it is what the reference gives."""
_SHARE_OF_REFERENCE = 0.8
_MOST_UPDATES = 400
_COMES_DOWN = 0.95
_MOST_OF_TAIL = 48
_PRIOR_INDEX = 0.25
_PRIOR_WEIGHT = 4.0


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a job knows of one section, all its ranks and earlier runs included; times are seconds."""

    tail: Tail = field(default_factory=Tail)
    """The tail of all but the first intervals of each cycle."""
    first_s: float = 0.0
    """The longest of those."""
    reference_s: float | None = None
    """The timeout of the reference's rule."""
    usual_reference_s: float | None = None
    """Its mean over the updates, of which there were ``updates``."""
    updates: int = 0
    raised: float = 1.0
    """Doubled by each kill of this timeout, and less with each update since."""
    early: Early = field(default_factory=Early)


class Estimate(NamedTuple):
    """A timeout, and what each consideration would make it (seconds)."""

    timeout_s: float
    budget_s: float
    """One interval in ``1 / budget`` exceeds this."""
    ceiling_s: float
    """The most that ``timeout_s`` may be, unless longer intervals were seen more than once."""
    first_s: float
    """The timeout of the first intervals of a cycle."""
    suspect_s: float | None = None
    """When an interval is suspected, if that is before ``timeout_s``."""


def after_update(known: Known, *, tail: Tail, passed: float, longest_s: float, first_s: float, factor: float) -> Known:
    """More was seen.

    Args:
        known: what was known before.
        tail: that of ``known`` and what all ranks have seen since.
        passed: how many intervals of one rank that is.
        longest_s: the longest of this run, the first ones included.
        first_s: the longest of those; 0 if there was none.
        factor: the reference's ``safety_factor``.
    """
    reference = calculate_timeout(
        longest=longest_s,
        safety_factor=factor,
        current=known.reference_s,
        current_was_calculated=known.reference_s is not None,
        floor=0.0,
    )
    updates = min(known.updates + 1, _MOST_UPDATES)
    usual = reference if known.usual_reference_s is None else known.usual_reference_s
    new, tail = tail.since(known.tail), Tail(dict(tail.counts))
    tail.forget(passed)
    return Known(
        tail=tail,
        first_s=max(first_s, known.first_s),
        reference_s=reference,
        usual_reference_s=usual + (reference - usual) / updates,
        updates=updates,
        raised=max(1.0, known.raised * _COMES_DOWN),
        early=early.after_update(known.early, new=new, longest_s=longest_s, first_s=first_s, factor=factor),
    )


def after_kill(known: Known, factor: float = 2.0) -> Known:
    """A timeout of this has ended a rank, or several in a row have, which ``factor`` says."""
    if factor == 1.0:
        return known
    return replace(known, raised=known.raised * factor, early=early.after_kill(known.early))


def estimate(known: Known, *, budget: float, factor: float) -> Estimate | None:
    """The timeout; None if nothing was seen."""
    usual = known.usual_reference_s
    tail = known.tail
    if usual is None:
        return None
    longest, total = tail.longest(_SEEN_ONCE), tail.total
    first = factor * known.first_s
    if longest is None or total < _FEW:
        timeout = max(first, usual, _ROOM_ABOVE_SEEN * (longest or 0.0)) * known.raised
        return Estimate(timeout, timeout, usual, timeout)
    common = tail.longest(max(_SEEN_ONCE, (1.0 - _COMMON) * total)) or longest
    by_budget = max(_extrapolated(tail, total, budget), _ROOM_ABOVE_SEEN * longest)
    room = _ROOM * (1.0 + HALF_LIFE / (HALF_LIFE + total)) * common  # twice as much while little is known
    habit = _ROOM_ABOVE_SEEN * (tail.longest(_SEEN_TWICE) or 0.0)
    ceiling = _SHARE_OF_REFERENCE * usual
    timeout = known.raised * max(min(max(by_budget, room), ceiling), habit)
    suspect = known.early.suspect_s
    if suspect is not None and suspect >= timeout:
        suspect = None
    return Estimate(timeout, by_budget, ceiling, max(timeout, first), suspect)


def _extrapolated(tail: Tail, total: float, budget: float) -> float:
    """Beyond what was seen the tail goes on as a power law, with the index of its longest part (Hill, Weissman).

    Few intervals say little of an index: it is drawn towards one that is heavy for a training step.
    """
    most = min(_MOST_OF_TAIL, total / 4)
    taken, excess = 0.0, 0.0
    parts: list[tuple[float, float]] = []
    base = 0.0
    for bucket in sorted(tail.counts, reverse=True):
        count, base = tail.counts[bucket], math.log(length_of(bucket))
        if taken and taken + count > most:
            break
        parts.append((count, base))
        taken += count
    excess = math.fsum(count * (log - base) for count, log in parts)
    index = (excess + _PRIOR_WEIGHT * _PRIOR_INDEX) / (taken + _PRIOR_WEIGHT)
    expected = max(total * budget, 1e-12)
    return math.exp(base + index * math.log(max(taken / expected, 1.0)))
