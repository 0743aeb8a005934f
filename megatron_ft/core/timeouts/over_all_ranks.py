"""From observed intervals on all ranks to new timeouts. The collective is handed in, so this needs no torch.

Whether there is enough data is decided after the collective, from values that are equal on all ranks: a rank
that decided alone could leave the others waiting in it.

Readiness and value are two things. Only an interval that has ended makes a timeout ready: five times the age of a
section that has never been closed would end a healthy rank. What goes on now counts in the value: a timeout below
its age would end the rank the moment it takes force.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ft.core.timeouts.budget_rule import DEFAULT_BUDGET, Known, after_update, estimate
from megatron_ft.core.timeouts.in_force import OUT_OF_SECTION, HeartbeatTimeouts, SectionTimeouts
from megatron_ft.core.timeouts.reference_rule import calculate_timeout
from megatron_ft.core.timeouts.tail import BUCKETS, Tail

NO_OBSERVATION = -1.0
"""Stands for "nothing was observed" in a maximum over ranks; every real interval is greater."""

MaxOverRanks = Callable[[Sequence[float]], tuple[list[float], list[int]]]
"""The maximum of each value over all ranks, and the lowest rank that has it."""


REFERENCE = "reference"
BUDGET = "budget"


class Rule(NamedTuple):
    """How a timeout follows from what was seen: see `docs/timeouts.md`.

    ``reference``: max(floor, safety_factor x longest interval), in seconds.
    """

    safety_factor: float
    floor: float
    name: str = REFERENCE
    budget: float = DEFAULT_BUDGET


class Calculation(NamedTuple):
    """How one timeout came about; seconds."""

    timeout_s: float
    previous_s: float | None
    max_observed_s: float
    rank_of_max: int
    rule: str = REFERENCE
    reference_s: float | None = None
    """What the reference's rule says."""
    budget_s: float | None = None
    """What the budget of false kills alone would ask for."""
    first_s: float | None = None
    """The timeout of the first intervals of a cycle, where it is another one."""
    suspect_s: float | None = None
    """When an interval is suspected, if that is before ``timeout_s``."""


class NotReady(NamedTuple):
    """No rank has observed these yet."""

    missing: list[str]


@dataclass
class Sight:
    """What one rank has observed of one section, in addition to what all ranks know."""

    known: Known
    new: Tail
    """Since the last calculation."""
    passed: int
    """How many intervals have ended since then."""
    first_s: float
    """The longest of the first ones of this cycle; NO_OBSERVATION if there was none."""


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
    seen: Mapping[str, Sight] | None = None,
) -> tuple[SectionTimeouts, dict[str, Calculation]] | NotReady:
    """New timeouts of the sections in ``observed``; OUT_OF_SECTION among them is the time in none.

    Sections that aren't in ``observed`` keep their timeout.

    Args:
        observed: the longest interval of this rank that has ended, in seconds, or NO_OBSERVATION.
        old: the timeouts until now.
        rule: factor and floor.
        max_over_ranks: the collective.
        going_on: the age in seconds of what this rank has open now.
        seen: for the rule ``budget``, what is known of each; what it is afterwards is written there.
    """
    current = {**old.section, OUT_OF_SECTION: old.out_of_section}
    calculated = old.calculated_sections | ({OUT_OF_SECTION} if old.is_out_of_section_calculated else set())
    if rule.name == BUDGET and seen is not None:
        result = _by_budget(observed, current, rule, max_over_ranks, going_on or {}, seen)
    else:
        result = _calculate(observed, current, calculated, rule, max_over_ranks, going_on or {})
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
) -> dict[str, Calculation] | NotReady:
    # one collective for both: what has ended, and the longest of that and what goes on
    so_far = [max(value, going_on.get(name, NO_OBSERVATION)) for name, value in observed.items()]
    maxima, ranks = max_over_ranks([*observed.values(), *so_far])
    count = len(observed)
    missing = [name for name, ended in zip(observed, maxima[:count], strict=True) if ended < 0]
    if missing:
        return NotReady(missing)
    result = {}
    for name, value, rank in zip(observed, maxima[count:], ranks[count:], strict=True):
        timeout = calculate_timeout(
            longest=value,
            safety_factor=rule.safety_factor,
            current=current[name],
            current_was_calculated=name in calculated,
            floor=rule.floor,
        )
        result[name] = Calculation(timeout, current[name], value, rank)
    return result


_GOES_ON = 1.25
"""How much longer than now what goes on may take at least."""


def _by_budget(
    observed: Mapping[str, float],
    current: Mapping[str, float | None],
    rule: Rule,
    max_over_ranks: MaxOverRanks,
    going_on: Mapping[str, float],
    seen: Mapping[str, Sight],
) -> dict[str, Calculation] | NotReady:
    values: list[float] = []
    for name, ended in observed.items():
        sight, now = seen[name], going_on.get(name, NO_OBSERVATION)
        tail = Tail(dict(sight.known.tail.counts))
        for bucket, count in sight.new.counts.items():
            tail.count(bucket, count)
        values += [ended, max(ended, now), now, sight.first_s, float(sight.passed), *tail.survivors()]
    maxima, ranks = max_over_ranks(values)
    width = 5 + BUCKETS
    parts = {name: maxima[at * width : (at + 1) * width] for at, name in enumerate(observed)}
    missing = [name for name, part in parts.items() if part[0] < 0]
    if missing:
        return NotReady(missing)
    result = {}
    for at, (name, part) in enumerate(parts.items()):
        _, longest, now, first, passed = part[:5]
        tail = Tail.from_survivors(part[5:])
        sight = seen[name]
        sight.known = after_update(
            sight.known,
            tail=tail,
            passed=passed,
            longest_s=longest,
            first_s=max(first, 0.0),
            factor=rule.safety_factor,
        )
        found = estimate(sight.known, budget=rule.budget, factor=rule.safety_factor)
        assert found is not None  # something was observed
        timeout = max(found.timeout_s, _GOES_ON * now, rule.floor)
        first_timeout = max(found.first_s, timeout)
        suspect = None if found.suspect_s is None else max(found.suspect_s, _GOES_ON * now, rule.floor)
        result[name] = Calculation(
            timeout_s=timeout,
            previous_s=current[name],
            max_observed_s=longest,
            rank_of_max=ranks[at * width + 1],
            rule=BUDGET,
            reference_s=sight.known.reference_s,
            budget_s=found.budget_s,
            first_s=first_timeout if first_timeout > timeout else None,
            suspect_s=suspect if suspect is not None and suspect < timeout else None,
        )
    return result
