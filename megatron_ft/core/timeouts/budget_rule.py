"""Rules for learned timeouts, from what is known of a section to its timeouts. Pure; see `docs/timeouts.md`.

A learned timeout is the moment at which an interval is suspected, not at which it is ended: the ranks are checked for
progress first. So it may be short: 0.6 of what the reference's rule would usually give without the intervals that such
a check has explained, unless longer ones were seen more than once and never explained.
"""

from __future__ import annotations

from msgspec.structs import replace

from megatron_ft.core.timeouts.exchange import LearnedTimeout
from megatron_ft.core.timeouts.known import MOST_RAISED, Known, PastIntervals
from megatron_ft.core.timeouts.reference_rule import calculate_timeout
from megatron_ft.core.timeouts.sketch import Sketch, bounded
from megatron_ft.core.timeouts.tail import HALF_LIFE, Tail, longest, share_left
from megatron_ft.core.times import MAX_SECONDS

BUDGET = "budget"
REFERENCE = "reference"
LEARNED_FLOOR_S = 5.0
"""Least learned timeout in seconds: with five times a step of 20 ms, a page fault would kill."""
_KEPT_CYCLES = 8
"""Number of cycles that make the timeout of first intervals."""
_FEW = 12.0
"""Fewer intervals beside the first ones say too little."""
_SHARE = 0.6
_SEEN_TWICE = 1.5
"""Counts fade: an interval that was seen twice may count a little less than 2."""
_ABOVE_SEEN = 1.25
_ABOVE_OPEN = 1.25
_MOST_UPDATES = 400
LIMIT = 4.0
"""Hard limit as a multiple of the timeout, even while ranks make progress."""
_ABOVE_EXPLAINED = 2.0
_RAISED_HALF_LIFE = 3400
"""In intervals. A cycle without a kill counts as 1/8 of it at least: "setup" has one interval per cycle."""
_LEAST_S = 1e-3
_NOTHING = 1.0 / 64.0
"""Counts below this are dropped."""


def after_update(known: Known, sketch: Sketch, *, factor: float) -> Known:
    """Take in the intervals of this cycle so far; ``factor`` is the reference's ``safety_factor``.

    Only the moving averages take a step each time; nothing else changes if the sketch is the same as last time.
    """
    if not sketch.ended:
        return known
    unexplained = longest(sketch.tail)
    known = replace(
        known,
        now=_later(known.start, sketch, sketch.ended),
        ended=sketch.ended,
        first_s=max(known.first_s, sketch.first_s),
        reference_s=_step(known.reference_s, sketch.longest_s, factor),
    )
    if unexplained is None:
        return known
    average, updates = _step(known.unexplained_s, unexplained, factor), min(known.updates + 1, _MOST_UPDATES)
    usual = average if known.usual_s is None else known.usual_s * (average / known.usual_s) ** (1 / updates)
    return replace(known, unexplained_s=average, usual_s=usual, updates=updates)


def begin_cycle(known: Known) -> Known:
    """Start a new cycle: its sketches begin with nothing."""
    now = known.now
    if now.raised < known.start.raised:  # intervals ended, and no kill since
        now = replace(now, raised=min(now.raised, _faded_raise(known.start.raised, _RAISED_HALF_LIFE / _KEPT_CYCLES)))
    return replace(known, start=now, now=now, ended=0, first_s=0.0, earlier_first_s=_first_intervals(known))


def after_kill(known: Known) -> Known:
    """Double the timeout: it has ended a rank, the length of whose interval is unknown."""
    raised = min(2.0 * known.now.raised, MOST_RAISED)
    return replace(known, start=replace(known.start, raised=raised), now=replace(known.now, raised=raised))


def learn(
    known: Known, sketch: Sketch, *, factor: float, rule: str, cap_s: float | None, previous_s: float | None
) -> LearnedTimeout | None:
    """Return the timeouts of a section; None if no interval of it has ever ended.

    Args:
        known: after `after_update` with this sketch.
        sketch: intervals of this cycle so far.
        factor: the reference's ``safety_factor``.
        rule: BUDGET or REFERENCE.
        cap_s: the user's timeout of the section: doubling extends a learned timeout up to this.
        previous_s: timeout until now, None if there was none.
    """
    estimates = _estimates(known, factor, rule)
    if estimates is None:
        return None
    raised, least = known.now.raised, _ABOVE_OPEN * sketch.open_s

    def in_force(estimate_s: float) -> float:
        floored = max(estimate_s, LEARNED_FLOOR_S)
        doubled = floored * raised
        capped = doubled if cap_s is None else min(doubled, max(cap_s, floored))
        return min(max(capped, least), MAX_SECONDS)

    timeout, first = (in_force(estimate) for estimate in estimates)
    limit = LIMIT * max(timeout, known.reference_s or 0.0, _ABOVE_EXPLAINED * known.now.explained_s)
    return LearnedTimeout(
        timeout_s=timeout,
        first_s=first,
        limit_s=min(max(limit, first), MAX_SECONDS),
        previous_s=previous_s,
        max_observed_s=sketch.longest_s if sketch.ended else None,
        rank_of_max=sketch.rank if sketch.ended else None,
        raised=raised,
    )


def _estimates(known: Known, factor: float, rule: str) -> tuple[float, float] | None:
    """Return the timeout of all intervals, and of the first ones of a cycle."""
    if known.reference_s is None:
        return None
    if rule == REFERENCE:
        return known.reference_s, known.reference_s
    first = factor * max(_first_intervals(known), default=0.0)
    tail = known.now.tail
    if known.usual_s is None or sum(count for _, count in tail) < _FEW:
        few = max(first, factor * (longest(tail) or 0.0)) or known.reference_s
        return few, few
    timeout = max(_SHARE * known.usual_s, _ABOVE_SEEN * (longest(tail, _SEEN_TWICE) or 0.0))
    return timeout, max(first, timeout)


def _first_intervals(known: Known) -> tuple[float, ...]:
    """Return the longest first interval of each of the last cycles that had one."""
    this = (known.first_s,) if known.first_s else ()
    return (*known.earlier_first_s, *this)[-_KEPT_CYCLES:]


def _step(average_s: float | None, longest_s: float, factor: float) -> float:
    return calculate_timeout(
        longest=max(longest_s, _LEAST_S),
        safety_factor=factor,
        current=average_s,
        current_was_calculated=average_s is not None,
    )


def _later(start: PastIntervals, sketch: Sketch, passed: int) -> PastIntervals:
    return PastIntervals(
        tail=_joined(start.tail, sketch.tail, passed),
        explained_s=max(start.explained_s * share_left(passed, HALF_LIFE), sketch.explained_s),
        raised=_faded_raise(start.raised, passed),
    )


def _joined(start: Tail, new: Tail, passed: int) -> Tail:
    share = share_left(passed, HALF_LIFE)
    counts = {bucket: count * share for bucket, count in start if count * share >= _NOTHING}
    for bucket, count in new:
        counts[bucket] = counts.get(bucket, 0.0) + count
    return bounded(counts)


def _faded_raise(raised: float, passed: float) -> float:
    return max(1.0, raised * share_left(passed, _RAISED_HALF_LIFE))
