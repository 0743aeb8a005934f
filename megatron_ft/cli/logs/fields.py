"""Which field of a record is of which type: logs may be damaged, of another version, or not ours at all.

Everything that reads a record relies on this: a field is of the type below, or None. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["checked", "is_moment", "is_sound"]

_MOST = 2**62
_LATEST_NS = 2**60  # 36 years after boot; with the offset to the wall clock it still is an int64
_READ = frozenset(
    {
        *("log_opened", "run_ended", "cycle_started", "cycle_ended", "attached", "detached", "timeouts", "progress"),
        *("first_iteration", "first_step", "fault_injected", "verdict", "evidence", "finding"),
        *("rank_exited", "rank_gone"),
    }
)
"""The records that the report reads; in others, a field of one of these names may mean something else."""


def _is_whole(value: object) -> bool:
    return type(value) is int and -_MOST <= value <= _MOST


def is_moment(value: object) -> bool:
    """On a monotonic clock, ns."""
    return type(value) is int and 0 <= value <= _LATEST_NS


def _is_number(value: object) -> bool:
    return _is_whole(value) or (type(value) is float and math.isfinite(value))


def _is_text(value: object) -> bool:
    """A lone surrogate is a str that can't be written to any file."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_list(value: object) -> bool:
    """What is in it is seen when it becomes an array."""
    return type(value) is list


def _is_list_of_text(value: object) -> bool:
    return type(value) is list and all(map(_is_text, value))


_MOMENTS = ("t", "at_ns", "since_ns", "met_ns", "spawned_ns", "user_code_ns", "from_ns", "last_transition_ns")
_WHOLES = ("rank", "cycle", "iteration", "pid", "wall_ns", "world_size", "exit_code", "exitcode", "lost")
_NUMBERS = ("elapsed_s", "timeout_s", "out_of_section", "heartbeat")
_TEXTS = ("ev", "host", "role", "run_id", "outcome", "kind", "type", "text", "detail", "section", "file", "summary")
_SOUND: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(_MOMENTS, is_moment),
    **dict.fromkeys(_WHOLES, _is_whole),
    **dict.fromkeys(_NUMBERS, _is_number),
    **dict.fromkeys(_TEXTS, _is_text),
    **dict.fromkeys(("by_us", "observed_only"), _is_flag),
    **dict.fromkeys(("dt_us", "code", "iterations"), _is_list),
    "names": _is_list_of_text,
}


def is_sound(record: Mapping[str, Any], name: str) -> bool:
    """Whether this field is there, and is what it should be; not for the fields that hold others."""
    return _SOUND[name](record.get(name))


def checked(record: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The record with None for each field that isn't what it should be, and whether the report misses one of them."""
    found, wrong = _object(record)
    for name, check in (("cause", _cause), ("ranks", _ranks), ("sections", _sections)):
        if found.get(name) is not None:
            found[name], is_wrong = check(found[name])
            wrong = wrong or is_wrong
    return found, wrong and record.get("ev") in _READ


def _object(record: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """One level: all but the fields that hold others."""
    wrong = [name for name, value in record.items() if name in _SOUND and value is not None and not _SOUND[name](value)]
    return {**record, **dict.fromkeys(wrong)}, bool(wrong)


def _cause(value: object) -> tuple[dict[str, Any] | None, bool]:
    return _object(value) if type(value) is dict else (None, True)


def _ranks(value: object) -> tuple[list[dict[str, Any]] | None, bool]:
    if type(value) is not list or not all(type(each) is dict for each in value):
        return None, True
    found = [_object(each) for each in value]
    return [each for each, _ in found], any(wrong for _, wrong in found)


def _sections(value: object) -> tuple[dict[str, float] | None, bool]:
    """Timeouts by name; those that are none are left out."""
    if type(value) is not dict:
        return None, True
    known = {name: seconds for name, seconds in value.items() if seconds is not None}
    found = {name: seconds for name, seconds in known.items() if _is_text(name) and _is_number(seconds)}
    return found, len(found) < len(known)
