"""New timeouts from the intervals of all ranks, by the reference's rule, for `RankMonitorClient.calculate_and_set_*`.

The collective is a parameter: this needs no torch.

Whether there is enough data is decided after the collective, from values that are equal on all ranks: a rank
that decided alone could leave the others waiting in it.

Readiness and value are two things. Only an interval that has ended makes a timeout ready: five times the age of a
section that has never been closed would end a healthy rank. What goes on now counts in the value: a timeout below
its age would end the rank the moment it takes force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron_ft.core.timeouts.in_force import OUT_OF_SECTION, HeartbeatTimeouts, SectionTimeouts
from megatron_ft.core.timeouts.reference_rule import calculate_timeout

NO_OBSERVATION = -1.0
"""Value of "nothing was observed" in a maximum over ranks; every real interval is greater."""

MaxOverRanks = Callable[[Sequence[float]], tuple[list[float], list[int]]]
"""The maximum of each value over all ranks, and the lowest rank that has it."""


class Rule(NamedTuple):
    """max(floor, safety_factor x longest interval), in seconds."""

    safety_factor: float
    floor: float


class Calculation(NamedTuple):
    """Origin of one timeout; seconds."""

    timeout_s: float
    previous_s: float | None
    max_observed_s: float
    rank_of_max: int


class NotReady(NamedTuple):
    """Timeouts that no rank has observed an interval for yet."""

    missing: list[str]


def calculate_heartbeats(
    observed: Mapping[str, float], old: HeartbeatTimeouts, rule: Rule, max_over_ranks: MaxOverRanks
) -> tuple[HeartbeatTimeouts, dict[str, Calculation]] | NotReady:
    """New heartbeat timeouts from this rank's longest "initial" and "subsequent" interval (seconds)."""
    current = {"initial": old.initial, "subsequent": old.subsequent}
    calculated = set(current) if old.were_calculated else set()
    result = _calculate(observed, current, calculated, rule, max_over_ranks, {})
    if isinstance(result, NotReady):
        return result
    return HeartbeatTimeouts(result["initial"].timeout_s, result["subsequent"].timeout_s, True), result


def calculate_sections(
    observed: Mapping[str, float],
    old: SectionTimeouts,
    rule: Rule,
    max_over_ranks: MaxOverRanks,
    going_on: Mapping[str, float] | None = None,
    *,
    leaves_out_open: bool = False,
) -> tuple[SectionTimeouts, dict[str, Calculation]] | NotReady:
    """New timeouts of the sections in ``observed``; OUT_OF_SECTION among them is the time in none.

    Sections that aren't in ``observed`` keep their timeout.

    Args:
        observed: the longest interval of this rank that has ended, in seconds, or NO_OBSERVATION.
        old: the timeouts until now.
        rule: factor and floor.
        max_over_ranks: the collective.
        going_on: the age in seconds of what this rank has open now.
        leaves_out_open: a section that no rank has closed, and that some rank has open, keeps its timeout. All ranks
            leave out the same sections, by the result of the collective.
    """
    current = {**old.section, OUT_OF_SECTION: old.out_of_section}
    calculated = old.calculated_sections | ({OUT_OF_SECTION} if old.is_out_of_section_calculated else set())
    result = _calculate(
        observed, current, calculated, rule, max_over_ranks, going_on or {}, leaves_out_open=leaves_out_open
    )
    if isinstance(result, NotReady):
        return result
    timeouts = {name: calculation.timeout_s for name, calculation in result.items()}
    out_of_section = timeouts.pop(OUT_OF_SECTION, None)
    new = SectionTimeouts(
        section={**old.section, **timeouts},
        out_of_section=old.out_of_section if out_of_section is None else out_of_section,
        calculated_sections=old.calculated_sections | set(timeouts),
        is_out_of_section_calculated=old.is_out_of_section_calculated or out_of_section is not None,
    )
    return new, result


def _calculate(
    observed: Mapping[str, float],
    current: Mapping[str, float | None],
    calculated: set[str],
    rule: Rule,
    max_over_ranks: MaxOverRanks,
    going_on: Mapping[str, float],
    *,
    leaves_out_open: bool = False,
) -> dict[str, Calculation] | NotReady:
    # one collective for both: what has ended, and the longest of that and what goes on
    so_far = [max(value, going_on.get(name, NO_OBSERVATION)) for name, value in observed.items()]
    maxima, ranks = max_over_ranks([*observed.values(), *so_far])
    count = len(observed)
    missing = [name for name, ended in zip(observed, maxima[:count], strict=True) if ended < 0]
    are_open = {name for name, age in zip(observed, maxima[count:], strict=True) if name in missing and age >= 0}
    left_out = are_open - {OUT_OF_SECTION} if leaves_out_open else set()
    if left_out != set(missing):
        return NotReady([name for name in missing if name not in left_out])
    result = {}
    for name, value, rank in zip(observed, maxima[count:], ranks[count:], strict=True):
        if name in left_out:
            continue
        timeout = calculate_timeout(
            longest=value,
            safety_factor=rule.safety_factor,
            current=current[name],
            current_was_calculated=name in calculated,
            floor=rule.floor,
        )
        result[name] = Calculation(timeout, current[name], value, rank)
    return result
