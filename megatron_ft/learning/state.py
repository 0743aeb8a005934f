"""What was learned, ``ft_state.json``, and which of it applies under today's configuration. Pure; seconds.

A plain ``RankMonitorClient.state_dict()`` is read too: it is what Megatron's own integrations write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from megatron_ft.core.errors import ConfigError, show
from megatron_ft.core.wording import counted
from megatron_ft.learning.messages import Observed
from megatron_ft.learning.rule import MOST_RAISED, calculate, in_force
from megatron_ft.learning.timeouts import (
    OUT_OF_SECTION,
    HeartbeatTimeouts,
    SectionTimeouts,
    mapping,
    number,
    seconds,
    state_from_dict,
    state_to_dict,
)

SECTIONS_FIELD = "rank_section_timeouts"
OUT_FIELD = "rank_out_of_section_timeout"
HEARTBEAT_FIELDS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout")
CONFIGURED_FIELDS = (SECTIONS_FIELD, OUT_FIELD, *HEARTBEAT_FIELDS)
"""Configuration fields that learned timeouts replace."""
SCHEMA = "megatron_ft.ft_state"
SCHEMA_VERSION = 4
"""4: ``sections`` and ``raised``. Versions 1 to 3 are still read."""


class NewerStateError(ConfigError):
    """A newer version of this package has written the document: it isn't broken, and is left alone."""


@dataclass(frozen=True, kw_only=True)
class LearnedTimeout:
    """A calculated timeout, and the longest interval it rests on, of a rank."""

    calculated_s: float
    longest_s: float = 0.0
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class LearnedState:
    """Everything learned, and the configured values at that time."""

    timeouts: Mapping[str, LearnedTimeout] = field(default_factory=dict)
    """By section, and OUT_OF_SECTION."""
    raised: Mapping[str, float] = field(default_factory=dict)
    """Factors by which kills have raised timeouts, also those that clients of ranks have calculated."""
    heartbeats: tuple[float, float] | None = None
    """(to the first heartbeat, between heartbeats)"""
    configured: Mapping[str, Any] | None = None
    """Fields of :data:`CONFIGURED_FIELDS` that were set when this was learned; None: unknown."""
    written_at_unix_s: float | None = None
    world_size: int | None = None

    def in_force(self, floor_s: float, configured: Mapping[str, Any]) -> dict[str, float]:
        """Return the timeouts in force with this floor; the user's bound what kills have raised."""
        return {
            name: in_force(
                name,
                each.calculated_s,
                each.longest_s,
                floor_s=floor_s,
                raised=self.raised.get(name, 1.0),
                cap_s=configured_s(configured, name),
            )
            for name, each in self.timeouts.items()
        }

    def learn(self, seen: Mapping[str, Observed], factor: float, keeps_raised: Collection[str] = ()) -> LearnedState:
        """Apply the rule to these intervals; what kills have raised halves, but for the names in ``keeps_raised``."""
        timeouts = dict(self.timeouts)
        for name, each in seen.items():
            before = timeouts.get(name)
            calculated_s = calculate(each.longest_s, None if before is None else before.calculated_s, factor)
            timeouts[name] = LearnedTimeout(calculated_s=calculated_s, longest_s=each.longest_s, rank=each.rank)
        halved = seen.keys() - {*keeps_raised}
        raised = {name: value / 2 if name in halved else value for name, value in self.raised.items()}
        return replace(self, timeouts=timeouts, raised={name: value for name, value in raised.items() if value > 1.0})

    def doubled(self, name: str) -> LearnedState:
        """Return the state in which the timeout of this name is doubled."""
        return replace(self, raised={**self.raised, name: min(2.0 * self.raised.get(name, 1.0), MOST_RAISED)})

    def difference(self, world_size: int) -> str:
        """Return one line if a job of another size learned this; "" if not, or if that isn't known."""
        if self.world_size is None or self.world_size == world_size:
            return ""
        then, now = counted(self.world_size, "rank"), counted(world_size, "rank")
        return f"they were learned with {then}, and this run has {now}: the longest intervals may be others now"


def configured_s(configured: Mapping[str, Any], name: str) -> float | None:
    """Return the user's timeout of a section, or of OUT_OF_SECTION; None is infinite, or not set."""
    timeouts = {**(configured.get(SECTIONS_FIELD) or {}), OUT_OF_SECTION: configured.get(OUT_FIELD)}
    timeout_s: float | None = timeouts.get(name)
    return timeout_s


def shown_s(value: float | None) -> str:
    """Format a timeout for a person."""
    return "infinity" if value is None else f"{value:.4g} s"


def that_applies(
    state: LearnedState, configured: Mapping[str, Any], sections: frozenset[str] | None = None
) -> tuple[LearnedState, dict[str, str]]:
    """Return what applies: all timeouts but those whose configured value the user has changed since.

    Also returns a line for each that doesn't apply.

    Args:
        state: what was learned.
        configured: today's fields of :data:`CONFIGURED_FIELDS`, only those that the user set.
        sections: names of today's sections; None: not known, all apply.
    """
    then, superseded = state.configured, dict[str, str]()

    def applies(name: str, key: str, learned_s: float) -> bool:
        fields = [configured, then or {}]
        if key == SECTIONS_FIELD:
            fields = [each.get(SECTIONS_FIELD) or {} for each in fields]
        key = name if key == SECTIONS_FIELD else key
        now_s, then_s = (each.get(key) for each in fields)
        if key not in fields[0] or then is None or now_s == then_s:
            return True  # the user sets nothing, the earlier value is unknown, or it is unchanged
        superseded[name] = (
            f"'{name}' keeps its configured timeout of {shown_s(now_s)}: it was changed (from {shown_s(then_s)}) since "
            f"{shown_s(learned_s)} was learned"
        )
        return False

    timeouts = {
        name: each
        for name, each in state.timeouts.items()
        if name == OUT_OF_SECTION or sections is None or name in sections
        if applies(name, OUT_FIELD if name == OUT_OF_SECTION else SECTIONS_FIELD, each.calculated_s)
    }
    beats = state.heartbeats
    if beats is not None:
        # one pair: applied as a whole or not at all
        do_apply = [applies(key, key, value) for key, value in zip(HEARTBEAT_FIELDS, beats, strict=True)]
        beats = beats if all(do_apply) else None
    return replace(state, timeouts=timeouts, heartbeats=beats), superseded


# -- the file ---------------------------------------------------------------------------------------------------


def from_client(
    client_state: Mapping[str, Any], *, configured: Mapping[str, Any], written_at_unix_s: float, world_size: int
) -> LearnedState:
    """Return what to write to the file after a client of a rank has calculated timeouts itself.

    ``client_state``: ``RankMonitorClient.state_dict()``.
    """
    calculated = state_from_dict(client_state)
    return LearnedState(
        timeouts={name: LearnedTimeout(calculated_s=timeout_s) for name, timeout_s in calculated.sections.items()},
        heartbeats=calculated.heartbeats,
        configured={key: configured[key] for key in CONFIGURED_FIELDS if key in configured},
        written_at_unix_s=written_at_unix_s,
        world_size=world_size,
    )


def client_state_of(
    timeouts: Mapping[str, float], heartbeats: tuple[float, float] | None, configured: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the state of a client that has learned these; with ``configured``, the user's other timeouts too."""
    then = configured or {}
    return state_to_dict(
        None if heartbeats is None else HeartbeatTimeouts(*heartbeats, True),
        SectionTimeouts(then.get(SECTIONS_FIELD) or {}, then.get(OUT_FIELD)).with_calculated(timeouts),
        with_configured=configured is not None,
    )


def file_document(state: LearnedState, configured: Mapping[str, Any], floor_s: float) -> dict[str, Any]:
    """Return the whole of the file: `to_document`, and what is in force in the form of nvidia-resiliency-ext."""
    timeouts = state.in_force(floor_s, configured)
    return {**to_document(state), **client_state_of(timeouts, state.heartbeats, configured)}


def to_document(state: LearnedState) -> dict[str, Any]:
    """Return the JSON-able document; keys that end in ``_s`` are seconds."""
    beats, written = state.heartbeats, state.written_at_unix_s
    at = None if written is None else datetime.fromtimestamp(written, timezone.utc).isoformat(timespec="seconds")
    entries = {
        name: {"calculated_s": each.calculated_s, "max_observed_s": each.longest_s, "rank_of_max": each.rank}
        for name, each in state.timeouts.items()
    }
    out = entries.pop(OUT_OF_SECTION, None)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "written_at_utc": at,
        "written_at_unix_s": written,
        "world_size": state.world_size,
        "sections": entries,
        "out_of_section": out,
        "heartbeats": None if beats is None else {"initial_s": beats[0], "subsequent_s": beats[1]},
        "raised": dict(state.raised),
        "configured_s": None if state.configured is None else dict(state.configured),
    }


def parse(document: object) -> LearnedState:
    """Read our document or a plain ``state_dict()``.

    Raises:
        ConfigError: it is neither, or a value in it can't be right; one line.
        NewerStateError: a newer version has written it.
    """
    given = mapping("the file", document)
    if "schema" not in given and "schema_version" not in given:
        if "current_timeouts" not in given:
            raise ConfigError(f"holds no learned timeouts, but {show(sorted(map(str, given)))}")
        plain = state_from_dict(given)
        timeouts = {name: LearnedTimeout(calculated_s=value) for name, value in plain.sections.items()}
        return LearnedState(timeouts=timeouts, heartbeats=plain.heartbeats)
    if given.get("schema") != SCHEMA:
        raise ConfigError(f"schema is {show(given.get('schema'))}, not {SCHEMA!r}")
    version = number("schema_version", given.get("schema_version"))
    if version > SCHEMA_VERSION:
        raise NewerStateError(f"schema_version is {version:g}, newer than {SCHEMA_VERSION}, the newest known here")
    entries = {str(name): each for name, each in mapping("sections", given.get("sections")).items()}
    if given.get("out_of_section") is not None:
        entries[OUT_OF_SECTION] = given["out_of_section"]
    seen = mapping("seen", given.get("seen") or {})  # up to version 3
    raised = {
        **{name: mapping(name, each)["raised"] for name, each in entries.items() if mapping(name, each).get("raised")},
        **mapping("raised", given.get("raised") or {}),
    }
    beats, world_size, written = (given.get(key) for key in ("heartbeats", "world_size", "written_at_unix_s"))
    if beats is not None:
        pair = mapping("heartbeats", beats)
        beats = seconds("initial_s", pair.get("initial_s")), seconds("subsequent_s", pair.get("subsequent_s"))
    return LearnedState(
        timeouts={name: _entry(name, mapping(name, each), seen.get(name)) for name, each in entries.items()},
        raised={str(name): min(max(1.0, number("raised", value)), MOST_RAISED) for name, value in raised.items()},
        heartbeats=beats,
        configured=_parse_configured(given.get("configured_s")),
        written_at_unix_s=None if written is None else number("written_at_unix_s", written),
        world_size=None if world_size is None else int(number("world_size", world_size)),
    )


def _entry(name: str, entry: Mapping[str, Any], seen: object) -> LearnedTimeout:
    """Return a timeout of any version; up to version 3 what the rule had calculated is in ``seen``, if anywhere."""
    calculated = entry.get("calculated_s")
    if calculated is None and seen is not None:
        calculated = mapping(f"seen of {name}", seen).get("reference_s")
    rank, longest = entry.get("rank_of_max"), entry.get("max_observed_s")
    return LearnedTimeout(
        calculated_s=seconds(name, entry.get("timeout_s") if calculated is None else calculated),
        longest_s=0.0 if longest is None else number(f"max_observed_s of {name}", longest),
        rank=None if rank is None else int(number(f"rank_of_max of {name}", rank)),
    )


def _parse_configured(value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None

    def timeout(name: str, value: object) -> float | None:
        return None if value is None else number(name, value)

    given = mapping("configured_s", value)
    found: dict[str, Any] = {key: timeout(key, given[key]) for key in (OUT_FIELD, *HEARTBEAT_FIELDS) if key in given}
    if SECTIONS_FIELD in given:
        sections = mapping(SECTIONS_FIELD, given[SECTIONS_FIELD])
        found[SECTIONS_FIELD] = {str(name): timeout(str(name), each) for name, each in sections.items()}
    return found
