"""The document of ``ft_state.json``: from and to the values of :mod:`megatron_ft.core.timeouts.learned`.

A plain ``RankMonitorClient.state_dict()`` is read too: it is what Megatron's own integrations write.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from megatron_ft.core.errors import ConfigError, show
from megatron_ft.core.timeouts.budget_rule import Known
from megatron_ft.core.timeouts.early import Early
from megatron_ft.core.timeouts.in_force import OUT_OF_SECTION, state_from_dict
from megatron_ft.core.timeouts.learned import HEARTBEAT_FIELDS, OUT_FIELD, SECTIONS_FIELD, LearnedState, LearnedTimeout
from megatron_ft.core.timeouts.tail import BUCKETS, Tail
from megatron_ft.core.times import MAX_SECONDS

SCHEMA = "megatron_ft.ft_state"
SCHEMA_VERSION = 2
"""2: what the rule `budget` knows is there (``seen``), and timeouts of first intervals."""


def to_document(state: LearnedState) -> dict[str, Any]:
    """The JSON-able document; keys that end in ``_s`` are seconds."""

    def entry(value: LearnedTimeout) -> dict[str, Any]:
        return {
            "timeout_s": value.timeout_s,
            "previous_s": value.previous_s,
            "max_observed_s": value.max_observed_s,
            "rank_of_max": value.rank_of_max,
            **({} if value.first_s is None else {"first_timeout_s": value.first_s}),
            **({} if value.suspect_s is None else {"suspect_after_s": value.suspect_s}),
        }

    beats, out, written = state.heartbeats, state.out_of_section, state.written_at_unix_s
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "written_at_utc": None
        if written is None
        else datetime.fromtimestamp(written, timezone.utc).isoformat(timespec="seconds"),
        "written_at_unix_s": written,
        "world_size": state.world_size,
        "layout": None if state.layout is None else dict(state.layout),
        "sections": {name: entry(value) for name, value in state.sections.items()},
        "out_of_section": None if out is None else entry(out),
        "heartbeats": None if beats is None else {"initial_s": beats[0], "subsequent_s": beats[1]},
        "seen": {name: _of_known(known) for name, known in sorted(state.known.items())},
        "configured_s": None if state.configured is None else dict(state.configured),
    }


def parse(document: object) -> LearnedState:
    """Read our document or a plain ``state_dict()``.

    Raises:
        ConfigError: it is neither, or a value in it can't be right; one line.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"holds {_kind(document)}, not a mapping")
    if "schema" in document or "schema_version" in document:
        return _parse_ours(document)
    if "current_timeouts" not in document:
        raise ConfigError(f"holds no learned timeouts, but {show(sorted(map(str, document)))}")
    try:
        plain = state_from_dict(document)
    except OverflowError:  # an integer of hundreds of digits
        raise ConfigError("holds a timeout that is too large a number") from None
    out = plain.out_of_section
    return LearnedState(
        sections={
            name: LearnedTimeout(timeout_s=_timeout(show(name), value)) for name, value in plain.sections.items()
        },
        out_of_section=None if out is None else LearnedTimeout(timeout_s=_timeout(OUT_OF_SECTION, out)),
        heartbeats=plain.heartbeats,
    )


def _parse_ours(document: Mapping[Any, Any]) -> LearnedState:
    if document.get("schema") != SCHEMA:
        raise ConfigError(f"schema is {show(document.get('schema'))}, not {SCHEMA!r}")
    version = _count("schema_version", document.get("schema_version"))
    if version > SCHEMA_VERSION:
        raise ConfigError(f"schema_version is {version}, newer than {SCHEMA_VERSION}, the newest known here")
    out, beats, world_size = (document.get(key) for key in ("out_of_section", "heartbeats", "world_size"))
    heartbeats = None
    if beats is not None:
        pair = _mapping("heartbeats", beats)
        heartbeats = (
            _timeout("heartbeats.initial_s", pair.get("initial_s")),
            _timeout("heartbeats.subsequent_s", pair.get("subsequent_s")),
        )
    return LearnedState(
        sections={
            str(name): _parse_entry(str(name), value)
            for name, value in _mapping("sections", document.get("sections")).items()
        },
        out_of_section=None if out is None else _parse_entry(OUT_OF_SECTION, out),
        heartbeats=heartbeats,
        configured=_parse_configured(document.get("configured_s")),
        written_at_unix_s=_number("written_at_unix_s", document.get("written_at_unix_s")),
        world_size=None if world_size is None else _count("world_size", world_size),
        layout=_parse_layout(document.get("layout")),
        known={
            str(name): _parse_known(str(name), value)
            for name, value in _mapping("seen", document.get("seen") or {}).items()
        },
    )


def _parse_entry(name: str, value: object) -> LearnedTimeout:
    where = show(name)
    entry = _mapping(where, value)
    rank, first, suspect = (entry.get(key) for key in ("rank_of_max", "first_timeout_s", "suspect_after_s"))
    return LearnedTimeout(
        timeout_s=_timeout(f"timeout_s of {where}", entry.get("timeout_s")),
        previous_s=_number(f"previous_s of {where}", entry.get("previous_s")),
        max_observed_s=_number(f"max_observed_s of {where}", entry.get("max_observed_s")),
        rank_of_max=None if rank is None else _count(f"rank_of_max of {where}", rank),
        first_s=None if first is None else _timeout(f"first_timeout_s of {where}", first),
        suspect_s=None if suspect is None else _timeout(f"suspect_after_s of {where}", suspect),
    )


def _of_known(known: Known) -> dict[str, Any]:
    return {
        "counts": known.tail.to_counts(),
        "first_s": known.first_s,
        "reference_s": known.reference_s,
        "usual_reference_s": known.usual_reference_s,
        "updates": known.updates,
        "raised": known.raised,
        "early": dataclasses.asdict(known.early),
    }


def _parse_known(name: str, value: object) -> Known:
    where = f"seen of {show(name)}"
    entry = _mapping(where, value)
    counts = {}
    for key, count in _mapping(f"counts in {where}", entry.get("counts")).items():
        number = _number(f"a count in {where}", count)
        if not str(key).isdecimal() or int(key) >= BUCKETS or number is None:
            raise ConfigError(f"counts in {where} must be by numbers below {BUCKETS}, not {show(key)}")
        counts[int(key)] = number
    raised = _number(f"raised in {where}", entry.get("raised"))
    return Known(
        tail=Tail.from_counts(counts),
        first_s=_number(f"first_s in {where}", entry.get("first_s")) or 0.0,
        reference_s=_number(f"reference_s in {where}", entry.get("reference_s")),
        usual_reference_s=_number(f"usual_reference_s in {where}", entry.get("usual_reference_s")),
        updates=_count(f"updates in {where}", entry.get("updates")),
        raised=max(1.0, raised or 1.0),
        early=_parse_early(f"early in {where}", entry.get("early")),
    )


def _parse_early(where: str, value: object) -> Early:
    """A file of an earlier version has none."""
    if value is None:
        return Early()
    entry = _mapping(where, value)
    names = ("longest_s", "usual_s", "untold_s")
    times = {name: _number(f"{name} in {where}", entry.get(name)) or 0.0 for name in names}
    updates, off = (_count(f"{name} in {where}", entry.get(name)) for name in ("updates", "off"))
    reference_s = _number(f"reference_s in {where}", entry.get("reference_s"))
    return Early(**times, reference_s=reference_s, updates=updates if times["usual_s"] else 0, off=off)


def _parse_layout(value: object) -> dict[str, int] | None:
    if value is None:
        return None
    sizes = _mapping("layout", value).items()
    return {str(kind): _count(f"layout.{show(str(kind))}", size) for kind, size in sizes}


def _parse_configured(value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None
    given = _mapping("configured_s", value)
    configured: dict[str, Any] = {
        key: _number(f"configured_s.{key}", given[key]) for key in (OUT_FIELD, *HEARTBEAT_FIELDS) if key in given
    }
    if SECTIONS_FIELD in given:
        sections = _mapping(f"configured_s.{SECTIONS_FIELD}", given[SECTIONS_FIELD])
        configured[SECTIONS_FIELD] = {
            str(name): _number(f"configured_s of {show(str(name))}", timeout) for name, timeout in sections.items()
        }
    return configured


def _mapping(name: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping, not {_kind(value)}")
    return value


def _number(name: str, value: object) -> float | None:
    """A finite number >= 0, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number, not {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0.0:
        raise ConfigError(f"{name} must be a finite number and not negative, not {show(value)}")
    return number


def _timeout(name: str, value: object) -> float:
    number = _number(name, value)
    if number is None or not 0.0 < number <= MAX_SECONDS:
        raise ConfigError(
            f"{name} must be a number of seconds above 0 and at most {MAX_SECONDS:.0e}, not {show(value)}"
        )
    return number


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a whole number and not negative, not {show(value)}")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
