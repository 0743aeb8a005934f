"""The timeouts in force, and the form in which the learned ones among them are kept.

All values are seconds; ``None`` is infinite. How they are learned: `reference_rule`, `budget_rule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron_ft.core.errors import ConfigError

_STATE_KEY = "current_timeouts"
OUT_OF_SECTION = "out_of_section"
"""Name of the time out of section; a user's section may not have it."""


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

    def enforced(self, floor_s: float) -> SectionTimeouts:
        """Return timeouts to enforce: calculated values, but none below ``floor_s``; configured ones as they are."""
        raised = {name: _at_least(floor_s, self.section[name]) for name in self.calculated_sections}
        out = self.out_of_section
        return replace(
            self,
            section={**self.section, **raised},
            out_of_section=_at_least(floor_s, out) if self.is_out_of_section_calculated else out,
        )


def _at_least(floor_s: float, timeout: float | None) -> float | None:
    return None if timeout is None else max(timeout, floor_s)


def state_to_dict(
    heartbeats: HeartbeatTimeouts | None, sections: SectionTimeouts | None, *, with_configured: bool = False
) -> dict[str, Any]:
    """The calculated timeouts only, JSON-serialisable, in the form that existing state files have.

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
    if sections is not None and (sections.calculated_sections or sections.is_out_of_section_calculated):
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
    """Calculated timeouts of a state, in seconds."""

    heartbeats: tuple[float, float] | None
    sections: dict[str, float]
    out_of_section: float | None


def state_from_dict(state: Mapping[str, Any]) -> CalculatedTimeouts:
    """Read what :func:`state_to_dict` wrote. A state without calculated timeouts is fine.

    Raises:
        ConfigError: something isn't a positive number of seconds, or has the wrong type.
    """
    current = _mapping("the state", _mapping("the state", state).get(_STATE_KEY) or {})
    heartbeats = None
    pair = _mapping("'heartbeat'", current.get("heartbeat") or {})
    if pair.get("were_calculated"):
        heartbeats = (
            _seconds("initial", pair.get("initial")),
            _seconds("subsequent", pair.get("subsequent")),
        )
    part = _mapping("'section'", current.get("section") or {})
    values = _mapping("'section'", part.get("section") or {})
    names = part.get("calculated_sections") or []
    if not isinstance(names, (list, tuple, set, frozenset)):
        raise ConfigError(f"'calculated_sections' must be a list, not {type(names).__name__}")
    sections = {str(name): _seconds(str(name), values.get(name)) for name in names}
    out_of_section = None
    if part.get("is_out_of_section_calculated"):
        out_of_section = _seconds(OUT_OF_SECTION, part.get("out_of_section"))
    return CalculatedTimeouts(heartbeats, sections, out_of_section)


def _mapping(what: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} of learned timeouts must be a mapping, not {type(value).__name__}")
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < float("inf"):
        raise ConfigError(f"learned timeout {name!r} must be a positive number of seconds, got {value!r}")
    return float(value)
