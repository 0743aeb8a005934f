"""What was learned, as ``ft_state.json`` holds it, and which of it applies today. Pure; seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from megatron_ft.errors import ConfigError, show
from megatron_ft.learning.messages import Observed
from megatron_ft.learning.rule import ABOVE_LONGEST, calculate
from megatron_ft.learning.timeouts import (
    OUT_OF_SECTION,
    HeartbeatTimeouts,
    SectionTimeouts,
    Timeout,
    checked,
    floor_of,
    state_from_dict,
    state_to_dict,
)
from megatron_ft.link.base.codec import Rank, Seconds
from megatron_ft.link.base.intervals import HangKind
from megatron_ft.link.base.launcher_part import PartEffect, PartEvent
from megatron_ft.link.base.times import MAX_SECONDS

SCHEMA = "megatron_ft.ft_state"
SCHEMA_VERSION = 4
"""Versions 1 to 3 are still read."""
HEARTBEATS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout")
_HEARTBEAT_KINDS = {HangKind.INITIAL_HEARTBEAT.value, HangKind.HEARTBEAT.value}
_MOST_RAISED = 64.0
_OptionalTimeout = Timeout | None | UnsetType


class UnusableStateError(ConfigError):
    """A document that isn't broken, and is to be left alone: a newer version has written it, or it can't be read."""


class Configured(msgspec.Struct, frozen=True, kw_only=True):
    """Configured timeouts that learned ones replace: only those that the user has set."""

    rank_section_timeouts: dict[str, Timeout | None] | UnsetType | None = UNSET
    rank_out_of_section_timeout: _OptionalTimeout = UNSET
    initial_rank_heartbeat_timeout: _OptionalTimeout = UNSET
    rank_heartbeat_timeout: _OptionalTimeout = UNSET

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Configured:
        """Return those among the set fields of a configuration."""
        return cls(**{name: values[name] for name in cls.__struct_fields__ if name in values})

    @property
    def sections(self) -> dict[str, float | None]:
        """Sections that the user has configured, each with its timeout."""
        return self.rank_section_timeouts or {}

    @property
    def timeouts(self) -> dict[str, float | None]:
        """Set values by section, OUT_OF_SECTION and name of a heartbeat's field; None is infinite."""
        rest = {OUT_OF_SECTION: self.rank_out_of_section_timeout, **{name: getattr(self, name) for name in HEARTBEATS}}
        return {**self.sections, **{name: value for name, value in rest.items() if value is not UNSET}}


class LearnedTimeout(msgspec.Struct, frozen=True, kw_only=True):
    """A calculated timeout, or one that a wrong kill has doubled, and the longest interval it rests on."""

    calculated_s: Timeout
    max_observed_s: Seconds = 0.0
    rank_of_max: Rank | None = None


class Heartbeats(msgspec.Struct, frozen=True):
    """Calculated timeouts until the first heartbeat, and between two."""

    initial_s: Timeout
    subsequent_s: Timeout


class LearnedState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything learned, and the configured values at that time."""

    schema: Literal["megatron_ft.ft_state"] = "megatron_ft.ft_state"
    schema_version: Literal[4] = 4
    world_size: Rank | None = None
    sections: dict[str, LearnedTimeout] = {}
    out_of_section: LearnedTimeout | None = None
    heartbeats: Heartbeats | None = None
    raised: dict[str, Annotated[float, Meta(ge=1, le=_MOST_RAISED)]] = {}
    """Factors of a file of earlier versions by which kills had raised timeouts; multiplied once it was read."""
    configured_s: Configured | None = None
    """Timeouts that were set when this was learned; None: unknown."""

    @property
    def timeouts(self) -> dict[str, LearnedTimeout]:
        """Timeouts by section, and OUT_OF_SECTION."""
        return {**self.sections, **({} if self.out_of_section is None else {OUT_OF_SECTION: self.out_of_section})}

    def with_timeouts(self, timeouts: Mapping[str, LearnedTimeout], **changes: Any) -> LearnedState:
        """Return this with other timeouts, by section and OUT_OF_SECTION."""
        sections = {name: each for name, each in timeouts.items() if name != OUT_OF_SECTION}
        return replace(self, sections=sections, out_of_section=timeouts.get(OUT_OF_SECTION), **changes)

    @property
    def client_heartbeats(self) -> HeartbeatTimeouts | None:
        """Heartbeat timeouts as a client has them."""
        beats = self.heartbeats
        return None if beats is None else HeartbeatTimeouts(beats.initial_s, beats.subsequent_s, True)

    def in_force(self, floor_s: float) -> dict[str, float]:
        """Return the timeouts in force: none is below its floor, or below 1.25 times the longest interval."""
        return {
            name: max(each.calculated_s, floor_of(name, floor_s), ABOVE_LONGEST * each.max_observed_s)
            for name, each in self.timeouts.items()
        }

    def learn(self, seen: Mapping[str, Observed], factor: float) -> LearnedState:
        """Apply the rule to these intervals."""
        timeouts = self.timeouts
        for name, each in seen.items():
            before = timeouts.get(name)
            calculated_s = calculate(each.longest_s, None if before is None else before.calculated_s, factor)
            timeouts[name] = LearnedTimeout(
                calculated_s=calculated_s, max_observed_s=each.longest_s, rank_of_max=each.rank
            )
        return self.with_timeouts(timeouts)

    def doubled(self, name: str, timeout_s: float, configured: Configured) -> LearnedState:
        """Return the state with twice this timeout, which was too short; at most the user's own.

        Later calculations average it, so that the surplus halves with each. One that a client has calculated, where no
        interval is known, may exceed the user's.
        """
        doubled_s, cap_s = min(2.0 * timeout_s, MAX_SECONDS), configured.timeouts.get(name)
        before = self.timeouts.get(name, LearnedTimeout(calculated_s=doubled_s))
        if cap_s is not None and before.max_observed_s:
            doubled_s = min(doubled_s, max(cap_s, timeout_s))
        return self.with_timeouts({**self.timeouts, name: replace(before, calculated_s=doubled_s)})

    def document(self, configured: Configured, floor_s: float) -> dict[str, Any]:
        """Return the whole of the file: this, and what is in force in the form of nvidia-resiliency-ext."""
        mine = self.with_timeouts({name: self.timeouts[name] for name in self.timeouts.keys() - _HEARTBEAT_KINDS})
        sections = SectionTimeouts(configured.sections, configured.timeouts.get(OUT_OF_SECTION))
        in_force = sections.with_calculated(mine.in_force(floor_s))
        return {**msgspec.to_builtins(mine), **state_to_dict(self.client_heartbeats, in_force, with_configured=True)}


@dataclass(frozen=True, slots=True)
class StateFile(PartEffect):
    """Read the file of learned timeouts, or replace it by ``document``; answered by ``StateFileDone``.

    ``at_end``: of the run. ``sets_aside``: rename a broken file.
    """

    path: str
    document: Mapping[str, Any] | None = None
    at_end: bool = False
    sets_aside: bool = False


@dataclass(frozen=True, slots=True)
class StateFileDone(PartEvent):
    """Answer to a ``StateFile``. ``state``: what was read, None if there is no usable file.

    ``problem``: what is wrong with the file, in a line; ``may_write``: this run may write it.
    """

    of: StateFile
    state: LearnedState | None = None
    problem: str = ""
    may_write: bool = True


def shown_s(value: float | None) -> str:
    """Format a timeout for a person."""
    return "infinity" if value is None else f"{value:.4g} s"


def that_applies(state: LearnedState, configured: Configured) -> tuple[LearnedState, dict[str, str]]:
    """Return what applies: all timeouts but those whose configured value the user has changed since.

    Also returns a line for each that doesn't apply.
    """
    now = configured.timeouts
    then = now if state.configured_s is None else state.configured_s.timeouts
    learned_s = {name: each.calculated_s for name, each in state.timeouts.items()}
    if state.heartbeats is not None:
        learned_s |= dict(zip(HEARTBEATS, msgspec.structs.astuple(state.heartbeats), strict=True))
    lines = {
        name: f"'{name}' keeps its configured timeout of {shown_s(now[name])}: it was changed "
        f"(from {shown_s(then.get(name))}) since {shown_s(value)} was learned"
        for name, value in learned_s.items()
        if name in now and now[name] != then.get(name)
    }
    kept = {name: each for name, each in state.timeouts.items() if name not in lines}
    beats = None if lines.keys() & {*HEARTBEATS} else state.heartbeats  # one pair, applied as a whole or not at all
    return state.with_timeouts(kept, heartbeats=beats), lines


def parse(document: object) -> LearnedState:
    """Read our document or a plain ``RankMonitorClient.state_dict()``, which Megatron's own integrations write.

    Raises:
        ConfigError: it is neither, or a value in it can't be right; one line.
        UnusableStateError: a newer version has written it.
    """
    given = document if isinstance(document, Mapping) else {}
    version = given.get("schema_version")
    if "current_timeouts" in given and "schema" not in given:
        beats, plain = state_from_dict(given)
        calculated = {name: {"calculated_s": value} for name, value in plain.calculated.items()}
        given = {"heartbeats": beats and {"initial_s": beats.initial, "subsequent_s": beats.subsequent}}
        given |= {"out_of_section": calculated.pop(OUT_OF_SECTION, None), "sections": calculated}
    elif given.get("schema") != SCHEMA or not isinstance(version, (int, float)):
        raise ConfigError(f"holds no learned timeouts: schema is {show(given.get('schema'))}, version {show(version)}")
    elif version > SCHEMA_VERSION:
        raise UnusableStateError(
            f"has schema_version {show(version)}, newer than {SCHEMA_VERSION}, the newest known here"
        )
    elif version < SCHEMA_VERSION:
        given = {**given, **_of_version_4(given)}
    state = checked(LearnedState, given)
    raised = {
        name: replace(each, calculated_s=min(each.calculated_s * state.raised.get(name, 1.0), MAX_SECONDS))
        for name, each in state.timeouts.items()
    }
    return state.with_timeouts(raised, raised={})


def _of_version_4(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document of versions 1 to 3 as one of version 4: ``reference_s`` was what the rule had calculated."""
    try:
        seen, out = given.get("seen") or {}, given.get("out_of_section")
        entries = {**given["sections"], **({} if out is None else {OUT_OF_SECTION: out})}
        raised = {
            name: min(max(1.0, each["raised"]), _MOST_RAISED) for name, each in entries.items() if each.get("raised")
        }
        for name, each in entries.items():
            calculated_s = (seen.get(name) or {}).get("reference_s") or each.get("timeout_s")
            longest_s, rank = each.get("max_observed_s") or 0.0, each.get("rank_of_max")
            entries[name] = {"calculated_s": calculated_s, "max_observed_s": longest_s, "rank_of_max": rank}
    except (AttributeError, KeyError, TypeError):
        raise ConfigError("learned timeouts: they aren't as an earlier version writes them") from None
    return {
        "schema_version": 4,
        "out_of_section": entries.pop(OUT_OF_SECTION, None),
        "sections": entries,
        "raised": raised,
    }
