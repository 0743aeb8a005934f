"""The document of ``ft_state.json``: from and to the values of :mod:`megatron_ft.core.timeouts.learned`.

A plain ``RankMonitorClient.state_dict()`` is read too: it is what Megatron's own integrations write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from msgspec.structs import replace

from megatron_ft.core.codec import convert, to_builtins
from megatron_ft.core.errors import ConfigError, ProtocolError, show
from megatron_ft.core.timeouts.exchange import LearnedTimeout
from megatron_ft.core.timeouts.in_force import OUT_OF_SECTION, state_from_dict
from megatron_ft.core.timeouts.known import MOST_RAISED, Known, PastIntervals
from megatron_ft.core.timeouts.learned import (
    HEARTBEAT_FIELDS,
    OUT_FIELD,
    SECTIONS_FIELD,
    LearnedState,
    client_state_of,
    from_timeout,
)
from megatron_ft.core.timeouts.sketch import bounded
from megatron_ft.core.timeouts.tail import BUCKETS
from megatron_ft.core.times import MAX_SECONDS

SCHEMA = "megatron_ft.ft_state"
SCHEMA_VERSION = 3
"""3: entries and ``seen`` are those of `LearnedTimeout` and `Known`. Versions 1 and 2 are still read."""


class NewerStateError(ConfigError):
    """A newer version of this package has written the document: it isn't broken, and is left alone."""


def file_document(state: LearnedState, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole of the file: `to_document`, and all timeouts in the form that nvidia-resiliency-ext reads."""
    timeouts = {name: entry.timeout_s for name, entry in state.timeouts.items()}
    return {**to_document(state), **client_state_of(timeouts, state.heartbeats, configured)}


def to_document(state: LearnedState) -> dict[str, Any]:
    """Return the JSON-able document; keys that end in ``_s`` are seconds."""
    beats, out, written = state.heartbeats, state.out_of_section, state.written_at_unix_s
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "written_at_utc": None
        if written is None
        else datetime.fromtimestamp(written, timezone.utc).isoformat(timespec="seconds"),
        "written_at_unix_s": written,
        "world_size": state.world_size,
        "sections": {name: to_builtins(entry) for name, entry in state.sections.items()},
        "out_of_section": None if out is None else to_builtins(out),
        "heartbeats": None if beats is None else {"initial_s": beats[0], "subsequent_s": beats[1]},
        "seen": {name: to_builtins(known) for name, known in sorted(state.known.items())},
        "configured_s": None if state.configured is None else dict(state.configured),
    }


def parse(document: object) -> LearnedState:
    """Read our document or a plain ``state_dict()``.

    Raises:
        ConfigError: it is neither, or a value in it can't be right; one line.
        NewerStateError: a newer version has written it.
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
        sections={name: from_timeout(_timeout(show(name), value)) for name, value in plain.sections.items()},
        out_of_section=None if out is None else from_timeout(_timeout(OUT_OF_SECTION, out)),
        heartbeats=plain.heartbeats,
    )


def _parse_ours(document: Mapping[Any, Any]) -> LearnedState:
    if document.get("schema") != SCHEMA:
        raise ConfigError(f"schema is {show(document.get('schema'))}, not {SCHEMA!r}")
    version = _count("schema_version", document.get("schema_version"))
    if version > SCHEMA_VERSION:
        raise NewerStateError(f"schema_version is {version}, newer than {SCHEMA_VERSION}, the newest known here")
    out, beats, world_size = (document.get(key) for key in ("out_of_section", "heartbeats", "world_size"))
    heartbeats = None
    if beats is not None:
        pair = _mapping("heartbeats", beats)
        heartbeats = (
            _timeout("heartbeats.initial_s", pair.get("initial_s")),
            _timeout("heartbeats.subsequent_s", pair.get("subsequent_s")),
        )
    entry, seen = (_entry, _seen) if version >= 3 else (_entry_of_version_2, _seen_of_version_2)
    return LearnedState(
        sections={
            str(name): entry(show(str(name)), value)
            for name, value in _mapping("sections", document.get("sections")).items()
        },
        out_of_section=None if out is None else entry(OUT_OF_SECTION, out),
        heartbeats=heartbeats,
        configured=_parse_configured(document.get("configured_s")),
        written_at_unix_s=_number("written_at_unix_s", document.get("written_at_unix_s")),
        world_size=None if world_size is None else _count("world_size", world_size),
        known={
            str(name): seen(f"seen of {show(str(name))}", value)
            for name, value in _mapping("seen", document.get("seen") or {}).items()
        },
    )


def _entry(where: str, value: object) -> LearnedTimeout:
    try:
        entry = convert(LearnedTimeout, value)
    except ProtocolError as error:
        raise ConfigError(f"{where}: {error}") from None
    for name in ("timeout_s", "first_s", "limit_s"):
        _timeout(f"{name} of {where}", getattr(entry, name))
    return entry


def _seen(where: str, value: object) -> Known:
    try:
        return convert(Known, value)
    except ProtocolError as error:
        raise ConfigError(f"{where}: {error}") from None


def _entry_of_version_2(where: str, value: object) -> LearnedTimeout:
    entry = _mapping(where, value)
    rank, first = entry.get("rank_of_max"), entry.get("first_timeout_s")
    plain = from_timeout(_timeout(f"timeout_s of {where}", entry.get("timeout_s")))
    return replace(
        plain,
        first_s=plain.first_s if first is None else _timeout(f"first_timeout_s of {where}", first),
        previous_s=_number(f"previous_s of {where}", entry.get("previous_s")),
        max_observed_s=_number(f"max_observed_s of {where}", entry.get("max_observed_s")),
        rank_of_max=None if rank is None else _count(f"rank_of_max of {where}", rank),
    )


def _seen_of_version_2(where: str, value: object) -> Known:
    entry = _mapping(where, value)
    counts = {}
    for key, count in _mapping(f"counts in {where}", entry.get("counts")).items():
        number = _number(f"a count in {where}", count)
        if not str(key).isdecimal() or int(key) >= BUCKETS or number is None:
            raise ConfigError(f"counts in {where} must be by numbers below {BUCKETS}, not {show(key)}")
        counts[int(key)] = number
    first_s = _number(f"first_s in {where}", entry.get("first_s"))
    raised = _number(f"raised in {where}", entry.get("raised")) or 1.0
    past = PastIntervals(tail=bounded(counts), raised=min(max(1.0, raised), MOST_RAISED))
    return Known(
        start=past,
        now=past,
        earlier_first_s=(first_s,) if first_s else (),
        reference_s=_number(f"reference_s in {where}", entry.get("reference_s")),
    )


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
    """Return a finite number >= 0, or None."""
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
