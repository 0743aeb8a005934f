"""Wording of lines for people: numbers, lists, iterations, and text from outside. Pure.

Internally, iterations count from 0, and a rank reports each when it begins: a rank that has reported 25 has completed
25. Megatron-LM counts from 1 and logs an iteration when it is over: the last one in its log is then "iteration 25", and
26 has begun. "After iteration 25" is true in both.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 100


def counted(number: int, noun: str) -> str:
    """Return "1 node" or "2 nodes"; for nouns whose plural takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(parts: Sequence[str], *, most: int = 8, joint: str = ", ") -> str:
    """Join the first ``most`` parts, as in "a, b and 3 more", or "a; b; and 3 more"."""
    shown, more = joint.join(parts[:most]), len(parts) - most
    return shown if more <= 0 else f"{shown}{joint.replace(',', '')}and {more} more"


def rough(seconds: float) -> str:
    """Return a time for a line, without its smaller part, as in "3 h"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return each row of cells as a line, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def when(iteration: int) -> str:
    """Return where a rank was that had reported this iteration: ``after iteration 25``."""
    return "in the first iteration" if iteration == 0 else f"after iteration {iteration}"


def begins(iteration: int) -> str:
    """Return the meaning of reporting this iteration: ``iteration 26 begins``."""
    return f"iteration {iteration + 1} begins"


def printable(text: str) -> str:
    """Return text from outside (an exception, a request, a file's name) in one line, harmless for a terminal.

    White space becomes spaces, so that it can't look like another line of the launcher; other unprintable characters
    (escape sequences, marks of writing direction, lone surrogates) are shown as Python escapes them.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else " " if each.isspace() else each.encode("unicode_escape").decode()
        for each in text
    )


def shown(value: object) -> str:
    """Return a peer's value for a line that a person reads: plain ASCII, and short."""
    if value is None or isinstance(value, (bool, float)):
        return str(value)
    if isinstance(value, (int, str)):
        text = ascii(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"a {type(value).__name__}"  # may be nested too deep to be written
