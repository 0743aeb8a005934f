"""Kinds of option values: text form, stored form, and the message of a refusal. No I/O."""

from __future__ import annotations

import contextlib
import math
import numbers
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.errors import ConfigError, Refused, nearest, show
from megatron_ft.link.base.times import MAX_SECONDS

DEFAULT_LOG_MAX_BYTES = 200_000_000
"""Most bytes of the event logs of one process. A step of training takes its monitor about 20 bytes."""
_NO_LIMIT = ("null", "none", "~", "inf", "+inf", "infinity")
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_NOT_FORWARDED = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT),  # can't be forwarded
        *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGABRT),  # stops and faults
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
    }
)
# numbers of the logging module; importing it would cost each monitor a megabyte for five integers
_LOG_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
_LOG_LEVEL_ALIASES = {"DBG": "DEBUG", "WARN": "WARNING", "FATAL": "CRITICAL"}


@dataclass(frozen=True, kw_only=True)
class OptionKind:
    """Kind of an option's values.

    `check` converts a user's value to the stored one, or raises `Refused`. `read` converts a text of the command line
    to something that `check` accepts or refuses. `plain` converts the stored value for JSON and YAML, in a form that
    `check` accepts.
    """

    check: Callable[[Any], Any]
    allowed: str
    read: Callable[[str], Any] = str
    plain: Callable[[Any], Any] = lambda stored: stored
    unit: str = ""
    metavar: str = "VALUE"

    def judge(self, label: str, value: object, shown: str = "") -> Any:
        """Return `value` as stored. Raises ConfigError, one line: `label`, the value (or `shown`), what is allowed."""
        try:
            return self.check(value)
        except Refused as refused:
            raise ConfigError(f"{label} {shown or show(value)}: must be {self.allowed}{refused}") from None

    def parse(self, label: str, given: object) -> Any:
        """Return a text of the command line as stored. Raises ConfigError, one line that begins with `label`."""
        value = self.read(given) if isinstance(given, str) else given
        return self.judge(label, value, str(given) if value is None else "")


def _number(value: object) -> float | None:
    """Return the value as a float if it is a finite number (no bool, no text), else None."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read(text: str) -> object:
    """Return what a word of the command line stands for: no limit, a number, or a text."""
    if text.strip().lower() in _NO_LIMIT:
        return None
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _amount(
    allowed: str, unit: str, *, most: float = MAX_SECONDS, zero: bool = False, none: bool = False
) -> OptionKind:
    def check(value: object) -> float | None:
        if value is None and none:
            return None
        number = _number(value)
        if number is not None and number <= most and (number > 0 or (zero and number == 0)):
            return number
        # YAML reads `1e3` as a text, too
        meant = _number(_read(value)) if isinstance(value, str) else None
        raise Refused("" if meant is None else f"; this is a string, write the number as {meant!r}")

    return OptionKind(check=check, read=_read, allowed=allowed, unit=unit)


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


def _text(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    raise Refused


def _yes_or_no(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in (*_TRUE, *_FALSE):
        return value.strip().lower() in _TRUE
    raise Refused


def _forwarded(value: object) -> tuple[signal.Signals, ...]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, Sequence):
        raise Refused
    numbers_ = dict.fromkeys(_signal(word) for word in words)
    for number in numbers_:
        if number in _NOT_FORWARDED:
            raise Refused(f"; {number.name} can't be forwarded")
    return tuple(numbers_)


def whole(first: int, last: int, unit: str = "") -> OptionKind:
    """Kind of whole numbers within these bounds."""

    def check(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and first <= value <= last:
            return value
        raise Refused

    allowed = f"a whole number from {first} to {last}"
    return OptionKind(check=check, read=_read, allowed=allowed, unit=unit, metavar="N")


def one_of(*words: str, aliases: Mapping[str, str] | None = None) -> OptionKind:
    """Kind of one of these words. ``aliases``: earlier words, and what each means."""

    def check(value: object) -> str:
        if isinstance(value, bool):  # YAML 1.1 reads the words on and off as booleans
            value = "on" if value else "off"
        if isinstance(value, str):
            value = (aliases or {}).get(value, value)
        if isinstance(value, str) and value in words:
            return value
        raise Refused(nearest(value, words) if isinstance(value, str) else "")

    return OptionKind(check=check, allowed=" or ".join(words))


def path(of: str, metavar: str) -> OptionKind:
    """Kind of paths of a file or directory; an empty one is none."""

    def check(value: object) -> str | None:
        value = value.__fspath__() if hasattr(value, "__fspath__") else value
        return None if value == "" else _text(value)

    return OptionKind(check=check, allowed=f"the path {of}", metavar=metavar)


TIMEOUT = _amount(f"a positive number of seconds, at most {MAX_SECONDS:.0e}, or null for no limit", "s", none=True)
DURATION = _amount(f"a positive number of seconds, at most {MAX_SECONDS:.0e}", "s")
DURATION_OR_ZERO = _amount(f"a number of seconds from 0 to {MAX_SECONDS:.0e}", "s", zero=True)
FACTOR = _amount("a finite number above 0", "", most=math.inf)
SIGNAL = OptionKind(
    check=_signal,
    read=_read,
    allowed="the name or number of a signal, for example SIGKILL or 9",
    plain=lambda stored: stored.name,
)
SIGNALS = OptionKind(
    check=_forwarded,
    allowed="names of signals, for example SIGUSR1,SIGUSR2",
    plain=lambda stored: ",".join(each.name for each in stored),
    metavar="SIGNALS",
)
LOG_LEVEL = OptionKind(
    check=_log_level,
    read=_read,
    allowed=f"one of {', '.join(_LOG_LEVELS)}, or a number from 10 to 50",
    plain=lambda stored: next((name for name, number in _LOG_LEVELS.items() if number == stored), stored),
)
COMMAND = OptionKind(check=_text, allowed="a shell command", metavar="COMMAND")
YES_OR_NO = OptionKind(check=_yes_or_no, allowed="true or false", metavar="BOOL")
FLAG = OptionKind(check=_yes_or_no, allowed="true or false", metavar="")
"""Kind without a value on the command line."""
