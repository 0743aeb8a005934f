"""The rule for learned timeouts, and the calculation over all ranks that scripts may call. Pure; seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ft.core.board.intervals import CHECKPOINTING, SETUP, STEP
from megatron_ft.learning.timeouts import OUT_OF_SECTION, floor_of

REPORT_FLOOR_S = 5.0
"""Least timeout that reports: with five times a step of 20 ms, a page fault would be reported."""
ABOVE_LONGEST = 1.25
MOST_EXTENDED = 4.0
"""Longest interval while ranks make progress, as a multiple of its learned timeout."""
MOST_RAISED = 64.0
_LEAST_S = 1e-3


def calculate(longest_s: float, previous_s: float | None, factor: float) -> float:
    """Return the calculated timeout; ``previous_s``: the one calculated before, None if there is none."""
    fresh = factor * max(longest_s, _LEAST_S)
    if previous_s is not None:
        fresh = (previous_s + fresh) / 2
    return max(fresh, ABOVE_LONGEST * longest_s)


def in_force(
    name: str, calculated_s: float, longest_s: float, *, floor_s: float, raised: float = 1.0, cap_s: float | None = None
) -> float:
    """Return the timeout in force.

    Args:
        name: the section, or OUT_OF_SECTION.
        calculated_s: see ``calculate``. ``longest_s``: the longest interval it rests on.
        floor_s: least timeout of a section other than "setup".
        raised: factor by which kills have raised it.
        cap_s: the user's timeout of the section: raising goes up to it.
    """
    floored = max(calculated_s, floor_of(name, floor_s))
    timeout_s = floored * raised
    if cap_s is not None:
        timeout_s = min(timeout_s, max(cap_s, floored))
    return max(timeout_s, ABOVE_LONGEST * longest_s)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Timeouts to learn now, and one line for each that isn't learned."""

    sections: tuple[str, ...]
    out_of_section: bool
    reasons: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Sections, and OUT_OF_SECTION if it is selected."""
        return [*self.sections, *([OUT_OF_SECTION] if self.out_of_section else [])]


def select(
    *, loaded: bool, setup_open: bool, enough_steps: bool, saved: bool, async_saves: bool, is_closing: bool
) -> Selection:
    """Decide which timeouts to learn, as Megatron's modules do.

    Args:
        loaded: "setup" held the load of a checkpoint from storage; without one, or with one from memory, it was
            shorter than others will be.
        setup_open: "setup" isn't over yet.
        enough_steps: enough training iterations for the longest to be typical.
        saved: there was a save.
        async_saves: how much of an asynchronous save falls into "checkpointing" differs between runs.
        is_closing: the run ends; until then the longest time out of section may be yet to come.
    """
    sections: list[str] = []
    reasons: list[str] = []
    if not loaded:
        reasons.append("the timeout of 'setup' is learned in a run that loads a persistent checkpoint")
    elif setup_open:
        reasons.append("the timeout of 'setup' isn't learned before its end")
    else:
        sections.append(SETUP)
    if enough_steps:
        sections.append(STEP)
    else:
        reasons.append("the timeout of 'step' isn't learned before more training iterations were seen")
    if not saved:
        reasons.append("the timeout of 'checkpointing' is learned after a save")
    elif async_saves:
        reasons.append("the timeout of 'checkpointing' isn't learned with asynchronous saves")
    else:
        sections.append(CHECKPOINTING)
    out_of_section = is_closing and saved and SETUP in sections and STEP in sections
    if is_closing and not out_of_section:
        reasons.append("the out-of-section timeout isn't learned: that takes a load, enough iterations and a save")
    return Selection(sections=tuple(sections), out_of_section=out_of_section, reasons=tuple(reasons))


# -- by a collective of the ranks, as nvidia-resiliency-ext's client does ----------------------------------------

NO_OBSERVATION = -1.0
"""Value of "nothing was observed" in a maximum over ranks; every real interval is greater."""
MaxOverRanks = Callable[[Sequence[float]], list[float]]


class NotReady(NamedTuple):
    """Timeouts that no rank has observed an interval for yet."""

    missing: list[str]


def calculate_over_ranks(
    names: Iterable[str],
    ended: Mapping[str, float],
    going_on: Mapping[str, float],
    previous: Mapping[str, float | None],
    factor: float,
    max_over_ranks: MaxOverRanks,
    *,
    leaves_out_open: bool = False,
) -> dict[str, float] | NotReady:
    """Return new timeouts by name. A collective: values that are equal on all ranks decide if there is enough data.

    Only an interval that has ended makes a timeout ready. What goes on now counts in the value: a timeout below its
    age would end the rank the moment it takes force.

    Args:
        names: what to calculate; OUT_OF_SECTION is the time in no section.
        ended: this rank's longest interval that has ended, or NO_OBSERVATION.
        going_on: the age of what this rank has open now.
        previous: values that were calculated before; None or missing: there is none.
        factor: see ``calculate``.
        max_over_ranks: the collective.
        leaves_out_open: a section that no rank has closed, and that some rank has open, keeps its timeout.
    """
    names = list(names)
    longest = [max(ended[name], going_on.get(name, NO_OBSERVATION)) for name in names]
    maxima = max_over_ranks([*(ended[name] for name in names), *longest])
    of_ended, of_all = maxima[: len(names)], dict(zip(names, maxima[len(names) :], strict=True))
    missing = [name for name, seconds in zip(names, of_ended, strict=True) if seconds < 0]
    left_out = {name for name in missing if leaves_out_open and name != OUT_OF_SECTION and of_all[name] >= 0}
    if left_out != set(missing):
        return NotReady([name for name in missing if name not in left_out])
    return {
        name: calculate(seconds, previous.get(name), factor) for name, seconds in of_all.items() if name not in left_out
    }
