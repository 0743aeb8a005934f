"""The rule `reference` for learned timeouts, that of nvidia-resiliency-ext. Pure; the same for heartbeats and sections.

Per rank the longest observed interval, over ranks the maximum, times ``safety_factor``. If the current value was
itself calculated, the new one is the mean of the two, an exponential moving average with weight 0.5, so that one slow
checkpoint doesn't throw the timeout about, but never less than what was just observed. A value that came from the
configuration is replaced. No calculated value is enforced below LEARNED_FLOOR_S.
"""

from __future__ import annotations

_EMA_WEIGHT = 0.5


def calculate_timeout(
    *,
    longest: float,
    safety_factor: float,
    current: float | None,
    current_was_calculated: bool,
    floor: float = 0.0,
) -> float:
    """The new timeout in seconds, from the longest interval over all ranks (seconds).

    ``floor`` is the least value returned: five times a 20 ms step is no timeout, a page fault would kill.
    """
    assert longest >= 0.0, longest
    fresh = safety_factor * longest
    if current is not None and current_was_calculated:
        # an interval that was just seen, and was healthy, may come again: with a factor below 2 the mean could be less
        fresh = max(_EMA_WEIGHT * current + (1.0 - _EMA_WEIGHT) * fresh, longest)
    return max(fresh, floor)
