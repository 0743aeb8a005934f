"""The timeouts of a client, and the form in which the calculated ones among them are kept.

All values are seconds; ``None`` is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from megatron_ft.errors import ConfigError, ProtocolError
from megatron_ft.link.base.codec import convert
from megatron_ft.link.base.intervals import SETUP
from megatron_ft.link.base.times import MAX_SECONDS

OUT_OF_SECTION = "out_of_section"
"""Name of the time out of section; a user's section may not have it."""
_SETUP_FLOORS = 4.0
"""A run has one "setup", and a cold cache makes it several times longer."""
Timeout = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
T = TypeVar("T")
S = TypeVar("S", float, float | None)


def floored(timeouts: Mapping[str, S], floor_s: float) -> dict[str, S]:
    """Return calculated timeouts as they are enforced: none is below ``floor_s``, or four times that for "setup"."""
    least_s = {SETUP: _SETUP_FLOORS * floor_s}
    return {name: each and max(each, least_s.get(name, floor_s)) for name, each in timeouts.items()}


@dataclass
class HeartbeatTimeouts:
    """Timeouts of the heartbeats API, in seconds; None is infinite."""

    initial: Timeout | None = None
    """From the start of monitoring to the first heartbeat."""
    subsequent: Timeout | None = None
    """Between two heartbeats."""
    were_calculated: bool | None = None
    """True: from observed intervals; False: from the configuration; None: not known."""

    @property
    def are_valid(self) -> bool:
        """True if both are set, so that a hang at any time would be noticed."""
        return self.initial is not None and self.subsequent is not None


@dataclass
class SectionTimeouts:
    """Timeouts of the sections API, in seconds; None is infinite."""

    section: Mapping[str, Timeout | None] = field(default_factory=dict)
    """Per section name."""
    out_of_section: Timeout | None = None
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

    def with_calculated(self, timeouts: Mapping[str, float | None]) -> SectionTimeouts:
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
        return {**{name: self.section.get(name) for name in self.calculated_sections}, **out}


class _Current(msgspec.Struct):
    heartbeat: HeartbeatTimeouts | None = None
    section: SectionTimeouts | None = None


def state_to_dict(heartbeats: HeartbeatTimeouts | None, sections: SectionTimeouts | None) -> dict[str, Any]:
    """Return heartbeats and sections, each if one was calculated, JSON-serialisable, in the form of existing files.

    Configured timeouts among ``sections`` are kept: nvidia-resiliency-ext takes a state for all that there are.
    """
    current: dict[str, Any] = {}
    if heartbeats is not None and heartbeats.were_calculated:
        current["heartbeat"] = asdict(heartbeats)
    if sections is not None and sections.calculated:
        current["section"] = {**asdict(sections), "calculated_sections": sorted(sections.calculated_sections)}
    return {"current_timeouts": current}


def state_from_dict(state: Mapping[str, Any]) -> tuple[HeartbeatTimeouts | None, SectionTimeouts]:
    """Return the calculated timeouts of what :func:`state_to_dict` wrote. A state without any is fine.

    Raises:
        ConfigError: something isn't a positive number of seconds, or has the wrong type.
    """
    current = checked(_Current, (state.get("current_timeouts") or {}) if isinstance(state, Mapping) else state)
    beats = current.heartbeat if current.heartbeat is not None and current.heartbeat.were_calculated else None
    calculated = (current.section or SectionTimeouts()).calculated
    if None in calculated.values() or (beats is not None and not beats.are_valid):
        raise ConfigError("learned timeouts: one that was calculated has no value")
    return beats, SectionTimeouts().with_calculated(calculated)


def checked(kind: Callable[..., T], document: object) -> T:
    """Return the document as an object of that class. Raises ConfigError if it is none."""
    try:
        return convert(kind, dict(document) if isinstance(document, Mapping) else document)
    except ProtocolError as error:
        raise ConfigError(f"learned timeouts: {str(error).partition(': ')[2]}") from None
