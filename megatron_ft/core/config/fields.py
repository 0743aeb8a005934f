"""What every field of the configuration may hold, how it is written as text, and what it is for.

One table, `FIELDS`, is the only owner of this: construction, assignment, YAML files, the command line and
``--help`` all go through it, so they can't disagree. Nothing here does I/O.
"""

from __future__ import annotations

import math
import numbers
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.timeouts.timeouts import OUT_OF_SECTION

MAX_SECONDS = 1e9
"""Largest finite duration, in seconds (31 years). Its nanoseconds fit in 64 bits with room to spare."""
MAX_SECTIONS = 64
MAX_SECTION_NAME_BYTES = 63

_NO_LIMIT = ("null", "none", "~", "inf", "+inf", "infinity")
_SECONDS = f"a positive number of seconds, at most {MAX_SECONDS:.0e}"
_TIMEOUT = f"{_SECONDS}, or null for no limit"

# The numbers of the logging module; importing it would cost each monitor a megabyte for five integers.
_LOG_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
_LOG_LEVEL_ALIASES = {"DBG": "DEBUG", "WARN": "WARNING", "FATAL": "CRITICAL"}


class Refused(ValueError):
    """A value that a field can't hold. The message is a hint to append to what is allowed, or empty."""


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One field of the configuration.

    `check` turns what a user gave into what the field stores, or raises `Refused`. `read` turns a text of the
    command line into something that `check` can judge.
    """

    check: Callable[[Any], Any]
    read: Callable[[str], Any]
    allowed: str
    help: str


def show(value: object) -> str:
    """The value as it appears in a one-line message: its repr, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(name: str, candidates: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"`, or the list of all candidates if none is near."""
    import difflib  # only needed once a user made a mistake

    known = list(candidates)
    folded = name.strip().lstrip("-").lower().replace("-", "_").replace(" ", "_")
    by_folded = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    for guess in (folded, folded.removeprefix("ft_"), folded.removeprefix("ft_param_")):
        near = difflib.get_close_matches(guess, by_folded, n=1, cutoff=0.6)
        if near:
            return f" (did you mean {by_folded[near[0]]!r}?)"
    return f" (known: {', '.join(known)})"


def _number(value: object) -> float | None:
    """The value as a float if it is a number (bool, text and infinite ones aren't), else None."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _seconds(value: object, zero: bool = False) -> float:
    number = _number(value)
    if number is None or number > MAX_SECONDS or number < 0 or (number == 0 and not zero):
        raise Refused(_text_hint(value))
    return number


def _text_hint(value: object) -> str:
    """YAML reads `1e3` and `"600"` as text: say how to write the number."""
    as_number = _number(_read_number(value)) if isinstance(value, str) else None
    return "" if as_number is None else f"; this is a text, the number is written {as_number!r}"


def _timeout(value: object) -> float | None:
    return None if value is None else _seconds(value)


def _factor(value: object) -> float:
    number = _number(value)
    if number is None or number <= 0:
        raise Refused(_text_hint(value))
    return number


def _floor(value: object) -> float:
    return _seconds(value, zero=True)


def _signal(value: object) -> signal.Signals:
    if isinstance(value, str):
        name = value.strip().upper()
        name = name if name.startswith("SIG") else f"SIG{name}"
        known = [s.name for s in signal.Signals]
        if name in known:
            return signal.Signals[name]
        raise Refused(nearest(name, known))
    if isinstance(value, int) and not isinstance(value, bool) and value in list(signal.Signals):
        return signal.Signals(value)
    raise Refused


def _log_level(value: object) -> int:
    if isinstance(value, str):
        name = value.strip().upper()
        name = _LOG_LEVEL_ALIASES.get(name, name)
        if name in _LOG_LEVELS:
            return _LOG_LEVELS[name]
    elif isinstance(value, int) and not isinstance(value, bool) and 10 <= value <= 50:
        return int(value)
    raise Refused


class SectionTimeoutMap(dict[str, "float | None"]):
    """Section name -> timeout in seconds, None for no limit.

    Changes in place are validated like assignments to the configuration: one that is refused raises
    ConfigError and changes nothing.
    """

    def __init__(self, items: Mapping[str, object] | Iterable[tuple[str, object]] = ()) -> None:
        super().__init__()
        self.update(items)

    def update(self, *others: Any, **more: Any) -> None:
        checked = {_section_name(name): _section_timeout(name, t) for name, t in dict(*others, **more).items()}
        if len(self.keys() | checked.keys()) > MAX_SECTIONS:
            raise ConfigError(f"rank_section_timeouts: {MAX_SECTIONS} sections at most")
        super().update(checked)

    def __setitem__(self, name: str, timeout: Any) -> None:
        self.update({name: timeout})

    def setdefault(self, name: str, timeout: Any = None) -> float | None:
        if name not in self:
            self[name] = timeout
        return self[name]

    def __ior__(self, other: Any) -> SectionTimeoutMap:  # type: ignore[override,misc]
        self.update(other)
        return self


def _section_name(name: object) -> str:
    # what is printable can also be encoded
    if name == OUT_OF_SECTION:
        raise ConfigError(
            f"rank_section_timeouts: {show(name)} can't be a section's name; for the time in no section there is "
            "rank_out_of_section_timeout"
        )
    if isinstance(name, str) and name.isprintable() and name == name.strip():
        if 0 < len(name.encode()) <= MAX_SECTION_NAME_BYTES:
            return str(name)
    raise ConfigError(
        f"rank_section_timeouts: {show(name)} is no section name; it must be a printable text "
        f"of 1 to {MAX_SECTION_NAME_BYTES} bytes without spaces around it"
    )


def _section_timeout(name: str, timeout: object) -> float | None:
    try:
        return _timeout(timeout)
    except Refused as refused:
        raise ConfigError(f"rank_section_timeouts[{name!r}] = {show(timeout)}: must be {_TIMEOUT}{refused}") from None


def _sections(value: object) -> SectionTimeoutMap:
    if not isinstance(value, Mapping):
        raise Refused
    return SectionTimeoutMap(value)


def _read_number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _read_timeout(text: str) -> object:
    return None if text.strip().lower() in _NO_LIMIT else _read_number(text)


def _read_name_or_number(text: str) -> object:
    stripped = text.strip()
    return int(stripped) if stripped.isdecimal() else stripped


def parse_section_timeouts(text: str) -> dict[str, float | None]:
    """Sections as the command line writes them: ``setup:600,step:180,checkpointing:null``.

    Raises ConfigError for anything else, with the offending part.
    """
    timeouts: dict[str, object] = {}
    for part in text.split(",") if text.strip() else []:
        name, colon, timeout = (piece.strip() for piece in part.rpartition(":"))
        if not colon or not name:
            raise ConfigError(
                f"rank_section_timeouts = {show(text)}: {show(part)} must be NAME:SECONDS, "
                "for example setup:600,step:180,checkpointing:null"
            )
        if name in timeouts:
            raise ConfigError(f"rank_section_timeouts = {show(text)}: section {name!r} is given twice")
        timeouts[name] = _read_timeout(timeout)
    return SectionTimeoutMap(timeouts)


def check_value(name: str, value: object) -> Any:
    """`value` as the field `name` stores it. Raises ConfigError, one line."""
    spec = FIELDS[name]
    try:
        return spec.check(value)
    except Refused as refused:
        raise ConfigError(f"{name} = {show(value)}: must be {spec.allowed}{refused}") from None


def parse_text(name: str, text: str) -> Any:
    """The text that the command line gives for the field `name`, as stored. Raises ConfigError, one line."""
    return check_value(name, FIELDS[name].read(text))


def plain(name: str, value: Any) -> Any:
    """A stored value in the form that JSON and YAML can hold and `check_value` accepts back."""
    if name == "rank_section_timeouts":
        return dict(value)
    if name == "rank_termination_signal":
        return value.name
    if name == "log_level":
        return next((text for text, number in _LOG_LEVELS.items() if number == value), value)
    return value


FIELDS: dict[str, FieldSpec] = {
    "initial_rank_heartbeat_timeout": FieldSpec(
        check=_timeout,
        read=_read_timeout,
        allowed=_TIMEOUT,
        help="Longest time from the start of a rank to its first heartbeat, in seconds. "
        "Not for ranks that open sections and send no heartbeat; for these it bounds each iteration of the warm-up.",
    ),
    "rank_heartbeat_timeout": FieldSpec(
        check=_timeout,
        read=_read_timeout,
        allowed=_TIMEOUT,
        help="Longest time between two heartbeats of a rank, in seconds. Only for ranks that send heartbeats.",
    ),
    "rank_section_timeouts": FieldSpec(
        check=_sections,
        read=parse_section_timeouts,
        allowed="a mapping from section names to timeouts",
        help="Longest time that each section may stay open, in seconds: "
        "setup:600,step:180,checkpointing:null. Replaces the whole map of the YAML file.",
    ),
    "rank_out_of_section_timeout": FieldSpec(
        check=_timeout,
        read=_read_timeout,
        allowed=_TIMEOUT,
        help="Longest time that a rank may spend with no section open, in seconds.",
    ),
    "safety_factor": FieldSpec(
        check=_factor,
        read=_read_number,
        allowed="a finite number above 0",
        help="A learned timeout is the longest interval that was seen on any rank, times this factor.",
    ),
    "calculated_timeout_floor": FieldSpec(
        check=_floor,
        read=_read_number,
        allowed=f"a number of seconds from 0 to {MAX_SECONDS:.0e}",
        help="No learned timeout is enforced below this, in seconds: no rank is killed for being fast.",
    ),
    "workload_check_interval": FieldSpec(
        check=_seconds,
        read=_read_number,
        allowed=_SECONDS,
        help="Longest time between two looks of a monitor at its rank, in seconds. Detection doesn't wait "
        "for it: a monitor also looks at the moment when something can be late.",
    ),
    "rank_termination_signal": FieldSpec(
        check=_signal,
        read=_read_name_or_number,
        allowed="the name or number of a signal, for example SIGKILL or 9",
        help="What ends a hung rank, by name or number. A rank that outlives it by 5 seconds gets SIGKILL. Up to 60 "
        "seconds in which it waited for a CPU don't count.",
    ),
    "log_level": FieldSpec(
        check=_log_level,
        read=_read_name_or_number,
        allowed=f"one of {', '.join(_LOG_LEVELS)}, or a number from 10 to 50",
        help="How much this package logs: DEBUG, INFO, WARNING, ERROR or CRITICAL.",
    ),
}
