"""The timeouts of a client, and the form in which the calculated ones among them are kept.

All values are seconds; ``None`` is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_ft.core.board.intervals import SETUP
from megatron_ft.core.errors import ConfigError, show
from megatron_ft.core.times import MAX_SECONDS

_STATE_KEY = "current_timeouts"
OUT_OF_SECTION = "out_of_section"
"""Name of the time out of section; a user's section may not have it."""
_SETUP_FLOORS = 4.0
"""A run has one "setup", and a cold cache makes it several times longer."""


def floor_of(name: str, floor_s: float) -> float:
    """Return the least learned timeout of this section that is in force, where the least of others is ``floor_s``."""
    return _SETUP_FLOORS * floor_s if name == SETUP else floor_s


@dataclass
class HeartbeatTimeouts:
    """Timeouts of the heartbeats API, in seconds; None is infinite."""

    initial: float | None = None
    """From the start of monitoring to the first heartbeat."""
    subsequent: float | None = None
    """Between two heartbeats."""
    were_calculated: bool | None = None
    """True: from observed intervals; False: from the configuration; None: not known."""

    @property
    def are_valid(self) -> bool:
        """True if both are set, so that a hang at any time would be noticed."""
        return self.initial is not None and self.subsequent is not None

    def enforced(self, floor_s: float) -> HeartbeatTimeouts:
        """Return timeouts to enforce: calculated values, but none below ``floor_s``; configured ones as they are."""
        if not self.were_calculated:
            return self
        return replace(self, initial=_at_least(floor_s, self.initial), subsequent=_at_least(floor_s, self.subsequent))


@dataclass
class SectionTimeouts:
    """Timeouts of the sections API, in seconds; None is infinite."""

    section: Mapping[str, float | None] = field(default_factory=dict)
    """Per section name."""
    out_of_section: float | None = None
    """While no section is open."""
    calculated_sections: set[str] = field(default_factory=set)
    """Names whose timeout was calculated from observed intervals."""
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        self.calculated_sections = set(self.calculated_sections)

    @property
    def are_valid(self) -> bool:
        """True if every section and the time out of section have a timeout."""
        return self.out_of_section is not None and all(t is not None for t in self.section.values())

    @property
    def were_calculated(self) -> bool:
        """True if all timeouts were calculated from observed intervals."""
        return self.is_out_of_section_calculated and set(self.section) <= set(self.calculated_sections)

    def with_calculated(self, timeouts: Mapping[str, float]) -> SectionTimeouts:
        """Return these with calculated values for some sections, and for OUT_OF_SECTION."""
        of_sections = {name: timeout for name, timeout in timeouts.items() if name != OUT_OF_SECTION}
        return SectionTimeouts(
            {**self.section, **of_sections},
            timeouts.get(OUT_OF_SECTION, self.out_of_section),
            self.calculated_sections | set(of_sections),
            self.is_out_of_section_calculated or OUT_OF_SECTION in timeouts,
        )

    @property
    def calculated(self) -> dict[str, float | None]:
        """The calculated values, by section and OUT_OF_SECTION."""
        out = {OUT_OF_SECTION: self.out_of_section} if self.is_out_of_section_calculated else {}
        return {**{name: self.section[name] for name in self.calculated_sections}, **out}

    def enforced(self, floor_s: float) -> SectionTimeouts:
        """Return timeouts to enforce: calculated values at or above their floor, configured ones as they are."""
        floored = {name: _at_least(floor_of(name, floor_s), timeout) for name, timeout in self.calculated.items()}
        return self.with_calculated({name: timeout for name, timeout in floored.items() if timeout is not None})


def _at_least(floor_s: float, timeout: float | None) -> float | None:
    return None if timeout is None else max(timeout, floor_s)


def state_to_dict(
    heartbeats: HeartbeatTimeouts | None, sections: SectionTimeouts | None, *, with_configured: bool = False
) -> dict[str, Any]:
    """Return the calculated timeouts only, JSON-serialisable, in the form that existing state files have.

    ``with_configured`` adds the configured timeouts of the other sections, and of the time in none:
    nvidia-resiliency-ext takes the values of a state for all that there are.
    """
    current: dict[str, Any] = {}
    if heartbeats is not None and heartbeats.were_calculated:
        current["heartbeat"] = {
            "initial": heartbeats.initial,
            "subsequent": heartbeats.subsequent,
            "were_calculated": True,
        }
    if sections is not None and sections.calculated:
        names = sorted(sections.calculated_sections)
        has_out_of_section = with_configured or sections.is_out_of_section_calculated
        current["section"] = {
            "section": dict(sections.section) if with_configured else {name: sections.section[name] for name in names},
            "out_of_section": sections.out_of_section if has_out_of_section else None,
            "calculated_sections": names,
            "is_out_of_section_calculated": sections.is_out_of_section_calculated,
        }
    return {_STATE_KEY: current}


class CalculatedTimeouts(NamedTuple):
    """Calculated timeouts of a state, in seconds; those of ``sections`` by name, also OUT_OF_SECTION."""

    heartbeats: tuple[float, float] | None
    sections: dict[str, float]


def state_from_dict(state: Mapping[str, Any]) -> CalculatedTimeouts:
    """Read what :func:`state_to_dict` wrote. A state without calculated timeouts is fine.

    Raises:
        ConfigError: something isn't a positive number of seconds, or has the wrong type.
    """
    current = mapping("the state", mapping("the state", state).get(_STATE_KEY) or {})
    heartbeats = None
    pair = mapping("'heartbeat'", current.get("heartbeat") or {})
    if pair.get("were_calculated"):
        heartbeats = seconds("initial", pair.get("initial")), seconds("subsequent", pair.get("subsequent"))
    part = mapping("'section'", current.get("section") or {})
    values = mapping("'section'", part.get("section") or {})
    names = part.get("calculated_sections") or []
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise ConfigError(f"'calculated_sections' must be a list, not {type(names).__name__}")
    sections = {str(name): seconds(str(name), values.get(name)) for name in names}
    if part.get("is_out_of_section_calculated"):
        sections[OUT_OF_SECTION] = seconds(OUT_OF_SECTION, part.get("out_of_section"))
    return CalculatedTimeouts(heartbeats, sections)


def mapping(what: str, value: object) -> Mapping[str, Any]:
    """Return the mapping. Raises ConfigError for anything else."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} of learned timeouts must be a mapping, not {type(value).__name__}")
    return value


def number(name: str, value: object) -> float:
    """Return a finite number >= 0. Raises ConfigError for anything else."""
    if not isinstance(value, bool) and isinstance(value, (int, float)):
        try:
            if math.isfinite(float(value)) and value >= 0:
                return float(value)
        except OverflowError:
            pass  # an integer of hundreds of digits
    raise ConfigError(f"{name} of learned timeouts must be a finite number, not negative, not {show(value)}")


def seconds(name: str, value: object) -> float:
    """Return a timeout. Raises ConfigError for anything else."""
    found = number(name, value)
    if not 0.0 < found <= MAX_SECONDS:
        raise ConfigError(
            f"learned timeout {show(name)} must be a positive number of seconds, at most {MAX_SECONDS:.0e}, "
            f"not {show(value)}"
        )
    return found
