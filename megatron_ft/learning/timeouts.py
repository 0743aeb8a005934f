"""The timeouts of a client, what was learned, and the forms of both in files. Pure; seconds, None is infinite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from megatron_ft.errors import ConfigError, ProtocolError, show
from megatron_ft.learning.messages import Observed
from megatron_ft.learning.rule import ABOVE_LONGEST, calculate
from megatron_ft.link.base.codec import convert
from megatron_ft.link.base.intervals import SETUP, HangKind
from megatron_ft.link.base.launcher_part import PartEffect, PartEvent
from megatron_ft.link.base.times import MAX_SECONDS

OUT_OF_SECTION = "out_of_section"
"""Name of the time out of section; a user's section may not have it."""
_SETUP_FLOORS = 4.0
"""A run has one "setup", and a cold cache makes it several times longer."""
Timeout = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
SCHEMA = "megatron_ft.ft_state"
SCHEMA_VERSION = 5
"""Versions 1 to 4 are still read."""
HEARTBEATS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout")
_HEARTBEAT_KINDS = {HangKind.INITIAL_HEARTBEAT.value, HangKind.HEARTBEAT.value}
_MOST_RAISED = 64.0
T = TypeVar("T")
S = TypeVar("S", float, float | None)


def floored(timeouts: Mapping[str, S], floor_s: float) -> dict[str, S]:
    """Return calculated timeouts as they are enforced: none is below ``floor_s``, or four times that for "setup"."""
    floors_s = {SETUP: _SETUP_FLOORS * floor_s}
    return {name: each and max(each, floors_s.get(name, floor_s)) for name, each in timeouts.items()}


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


def configured_of(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the timeouts among the set fields of a configuration, which learned ones replace; None is infinite.

    They are named by section, OUT_OF_SECTION, and by the field of a heartbeat.
    """
    names = {"rank_out_of_section_timeout": OUT_OF_SECTION, **dict(zip(HEARTBEATS, HEARTBEATS, strict=True))}
    rest = {name: values[field] for field, name in names.items() if field in values}
    return {**(values.get("rank_section_timeouts") or {}), **rest}


class LearnedState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything learned, and the configured values at that time.

    Args:
        timeouts: by section and OUT_OF_SECTION, as calculated, or doubled after a wrong kill; in memory also by kind of
            heartbeat, where a kill has doubled what a client had calculated.
        heartbeats: calculated ones, if there are any.
        configured_s: timeouts that were set when this was learned; None: unknown.
    """

    timeouts: dict[str, Timeout] = {}
    heartbeats: HeartbeatTimeouts | None = None
    configured_s: dict[str, Timeout | None] | None = None

    def learn(self, seen: Mapping[str, Observed], factor: float) -> LearnedState:
        """Apply the rule to these intervals."""
        new = {name: calculate(each.longest_s, self.timeouts.get(name), factor) for name, each in seen.items()}
        return replace(self, timeouts={**self.timeouts, **new})

    def doubled(self, name: str, timeout_s: float, configured: Mapping[str, float | None]) -> LearnedState:
        """Return the state with twice this timeout, which was too short; up to the user's own, if that is longer.

        Later calculations average it, so that the surplus halves with each.
        """
        doubled_s, own_s = min(2.0 * timeout_s, MAX_SECONDS), configured.get(name)
        if own_s is not None and timeout_s <= own_s:
            doubled_s = min(doubled_s, own_s)
        return replace(self, timeouts={**self.timeouts, name: doubled_s})

    def document(self, configured: Mapping[str, float | None], floor_s: float) -> dict[str, Any]:
        """Return the whole of the file: this, and what is in force in the form of nvidia-resiliency-ext."""
        mine = {name: timeout_s for name, timeout_s in self.timeouts.items() if name not in _HEARTBEAT_KINDS}
        own = {name: timeout for name, timeout in configured.items() if name not in HEARTBEATS}
        sections = SectionTimeouts(out_of_section=own.pop(OUT_OF_SECTION, None), section=own)
        in_force = sections.with_calculated(floored(mine, floor_s))
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "timeouts": mine, "configured_s": {**configured}}
        return {**head, **state_to_dict(self.heartbeats, in_force)}


@dataclass(frozen=True)
class StateFile(PartEffect, PartEvent):
    """Read the file of learned timeouts, or replace it by ``document``; and the result, an event.

    ``at_end``: of the run. ``state``: what was read; ``problem``: why the file can't be used, in a line.
    """

    path: str
    document: Mapping[str, Any] | None = None
    at_end: bool = False
    state: LearnedState | None = None
    problem: str = ""


def that_applies(state: LearnedState, now: Mapping[str, float | None]) -> tuple[LearnedState, list[str]]:
    """Return what applies: all timeouts but those whose configured value (``now``) the user has changed since.

    Also returns a line for each that doesn't apply.
    """

    def shown(value: float | None) -> str:
        return "infinity" if value is None else f"{value:.4g} s"

    then = now if state.configured_s is None else state.configured_s
    beats, learned_s = state.heartbeats, dict[str, float | None](state.timeouts)
    if beats is not None:
        learned_s |= zip(HEARTBEATS, (beats.initial, beats.subsequent), strict=True)
    changed = [name for name in learned_s if name in now and now[name] != then.get(name)]
    lines = [
        f"'{name}' keeps its configured timeout of {shown(now[name])}: it was changed "
        f"(from {shown(then.get(name))}) since {shown(learned_s[name])} was learned"
        for name in changed
    ]
    kept = {name: timeout_s for name, timeout_s in state.timeouts.items() if name not in changed}
    beats = None if {*changed} & {*HEARTBEATS} else beats  # one pair, applied as a whole or not at all
    return replace(state, timeouts=kept, heartbeats=beats), lines


def parse(document: object) -> LearnedState:
    """Read our document or a plain ``RankMonitorClient.state_dict()``, which Megatron's own integrations write.

    Raises:
        ConfigError: it is neither, or a newer version has written it, or a value in it can't be right; one line.
    """
    given = document if isinstance(document, Mapping) else {}
    version = given.get("schema_version")
    if "current_timeouts" in given and "schema" not in given:
        mine: Mapping[str, Any] = {"timeouts": state_from_dict(given)[1].calculated}
    elif given.get("schema") != SCHEMA or not isinstance(version, (int, float)):
        raise ConfigError(f"holds no learned timeouts: schema is {show(given.get('schema'))}, version {show(version)}")
    elif version > SCHEMA_VERSION:
        raise ConfigError(f"has schema_version {show(version)}, newer than {SCHEMA_VERSION}, the newest known here")
    else:
        mine = given if version == SCHEMA_VERSION else _of_version_5(given)
    return replace(checked(LearnedState, {**mine, "heartbeats": None}), heartbeats=state_from_dict(given)[0])


def _of_version_5(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document of versions 1 to 4 as one of version 5.

    ``reference_s`` was what the rule had calculated, ``raised`` the factor by which kills had made a timeout longer.
    """
    try:
        out, seen, raised = given.get("out_of_section"), given.get("seen") or {}, given.get("raised") or {}
        timeouts = dict[str, float]()
        for name, each in {**given["sections"], **({} if out is None else {OUT_OF_SECTION: out})}.items():
            calculated_s = (seen.get(name) or {}).get("reference_s") or each.get("calculated_s") or each["timeout_s"]
            factor = min(max(1.0, each.get("raised") or raised.get(name) or 1.0), _MOST_RAISED)
            least_s = ABOVE_LONGEST * (each.get("max_observed_s") or 0.0)
            timeouts[name] = min(max(calculated_s * factor, least_s), MAX_SECONDS)
        configured = given.get("configured_s")
        return {"timeouts": timeouts, "configured_s": configured and configured_of(configured)}
    except (AttributeError, KeyError, TypeError, OverflowError):
        raise ConfigError("learned timeouts: they aren't as an earlier version writes them") from None
