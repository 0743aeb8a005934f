"""What was learned, as ``ft_state.json`` holds it, and which of it applies today. Pure; seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
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
    floored,
    state_from_dict,
    state_to_dict,
)
from megatron_ft.link.base.intervals import HangKind
from megatron_ft.link.base.launcher_part import PartEffect, PartEvent
from megatron_ft.link.base.times import MAX_SECONDS

SCHEMA = "megatron_ft.ft_state"
SCHEMA_VERSION = 5
"""Versions 1 to 4 are still read."""
HEARTBEATS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout")
_HEARTBEAT_KINDS = {HangKind.INITIAL_HEARTBEAT.value, HangKind.HEARTBEAT.value}
_MOST_RAISED = 64.0


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

    def in_force(self, floor_s: float) -> dict[str, float]:
        """Return the timeouts in force: none is below its floor."""
        return floored(self.timeouts, floor_s)

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
        in_force = sections.with_calculated(replace(self, timeouts=mine).in_force(floor_s))
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


def shown_s(value: float | None) -> str:
    """Format a timeout for a person."""
    return "infinity" if value is None else f"{value:.4g} s"


def that_applies(state: LearnedState, now: Mapping[str, float | None]) -> tuple[LearnedState, list[str]]:
    """Return what applies: all timeouts but those whose configured value (``now``) the user has changed since.

    Also returns a line for each that doesn't apply.
    """
    then = now if state.configured_s is None else state.configured_s
    beats = state.heartbeats
    learned_s = {
        **state.timeouts,
        **dict(zip(HEARTBEATS, (beats.initial, beats.subsequent) if beats else (), strict=False)),
    }
    changed = [name for name in learned_s if name in now and now[name] != then.get(name)]
    lines = [
        f"'{name}' keeps its configured timeout of {shown_s(now[name])}: it was changed "
        f"(from {shown_s(then.get(name))}) since {shown_s(learned_s[name])} was learned"
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
        return {"timeouts": timeouts, "configured_s": None if configured is None else configured_of(configured)}
    except (AttributeError, KeyError, TypeError, OverflowError):
        raise ConfigError("learned timeouts: they aren't as an earlier version writes them") from None
