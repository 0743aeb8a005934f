"""From when on a rank is suspected: sooner than its learned timeout, because a suspicion terminates no rank. Pure.

All ranks are checked for progress before a suspected one is terminated (`core.agent.suspicion`), which distinguishes
most slow steps from a hang. So a rank is suspected no later than the reference's rule would have terminated it in this
job. Its learned timeout, which bears what was seen more than once, says how long it may go on while others make
progress.

An interval that outlasted the suspicion was recognised as no hang, and doesn't count. One that never was suspected
keeps the suspicion above it, and a rank that was terminated turns it off for a while: then only the learned timeout
counts, as where the progress of all ranks cannot be checked.

Times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ft.core.timeouts.reference_rule import calculate_timeout
from megatron_ft.core.timeouts.tail import Tail

CHECK_S = 1.9
"""From a suspicion until the rank is terminated, at most: a starved rank answers late."""
_SHARE = 0.8
_LEAST_SHARE = 0.4
_ABOVE_UNTOLD = 1.25
_FADES = 0.995
_MOST_UPDATES = 400
_LEAST_S = 1e-3
_OFF_FOR = 200
"""Updates, after a kill."""


@dataclass(frozen=True, kw_only=True)
class Early:
    """What a job knows of the early suspicion of one section."""

    longest_s: float = 0.0
    """The longest interval since the reference's rule would have restarted the job."""
    reference_s: float | None = None
    """The timeout that it would have now."""
    usual_s: float = 0.0
    """Its geometric mean over the updates, of which there were ``updates``: a slow step raises it for long."""
    updates: int = 0
    untold_s: float = 0.0
    """The longest interval that was never suspected; it fades."""
    off: int = 0
    """For this many more updates there is no early suspicion."""

    @property
    def suspect_s(self) -> float | None:
        """An interval that lasts longer is suspected; None: only one that lasts longer than the learned timeout."""
        if self.off or not self.updates:
            return None
        reference = self.usual_s if self.reference_s is None else min(self.usual_s, self.reference_s)
        by_reference = max(_SHARE * reference - CHECK_S, _LEAST_SHARE * reference)
        return max(by_reference, _ABOVE_UNTOLD * self.untold_s)


def after_update(early: Early, *, new: Tail, longest_s: float, first_s: float, factor: float) -> Early:
    """More was seen.

    Args:
        early: what was known before.
        new: all intervals since, but for the first ones of the cycle.
        longest_s: the longest of this run; less than what is known says that a new run has begun.
        first_s: the longest of its first ones.
        factor: the reference's ``safety_factor``.
    """
    longest_new = new.longest() or 0.0
    survived = longest_new if early.reference_s is None else new.longest(below_s=early.reference_s) or 0.0
    would_have_ended = survived < longest_new
    longest = max(0.0 if would_have_ended else min(early.longest_s, longest_s), survived, first_s)
    reference = calculate_timeout(
        longest=max(longest, _LEAST_S),
        safety_factor=factor,
        current=early.reference_s,
        current_was_calculated=early.reference_s is not None,
        floor=0.0,
    )
    updates = min(early.updates + 1, _MOST_UPDATES)
    untold = new.longest(below_s=early.suspect_s)
    return Early(
        longest_s=longest,
        reference_s=reference,
        usual_s=reference if updates == 1 else early.usual_s * (reference / early.usual_s) ** (1 / updates),
        updates=updates,
        untold_s=max(_FADES * early.untold_s, untold or 0.0),
        off=max(0, early.off - 1),
    )


def after_kill(early: Early) -> Early:
    """A rank was terminated by it, or by the learned timeout."""
    return replace(early, off=_OFF_FOR)
