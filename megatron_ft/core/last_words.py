"""What a rank wrote about its own end: an uncaught exception, or its stacks at the signal that ended it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from megatron_ft.core.stack_dump import Frame, frame_that_tells, parse_faulthandler

__all__ = ["EXCEPTION_MARK", "LastWords", "last_words"]

EXCEPTION_MARK = "Uncaught exception of the rank:"
"""Begins a line, with the time in nanoseconds, before the exception in one line, and its traceback."""
_FATAL_MARK = "Fatal Python error: "
_FRAME = re.compile(r'^ +File "(.*)", line (\d+), in (.*)$')


class LastWords(NamedTuple):
    """What could be read; empty where nothing was written."""

    error: str = ""
    """Type and message, in one line."""
    where: str = ""
    """The innermost call in the user's code: "loader.py:88 next_batch"."""
    exception: str = ""
    """The traceback."""
    fatal_error: str = ""
    """The stacks that `faulthandler` wrote at a fatal signal."""
    raised_at_ns: int = 0
    """CLOCK_MONOTONIC; 0 where that isn't known."""


def last_words(text: str, *, library: Iterable[str] = ()) -> LastWords:
    """Read the memory that a rank's witness wrote. ``library`` as for ``frame_that_tells``."""
    places = tuple(library)
    exception_at, fatal_at = text.rfind(EXCEPTION_MARK), text.rfind(_FATAL_MARK)
    if fatal_at > exception_at:
        fatal = text[fatal_at:].strip()
        # the thread that died is the current one; if that isn't one of Python's, nothing tells where it was
        at = fatal.find("Current thread 0x")
        stacks = parse_faulthandler(fatal[at:]) if at >= 0 else []
        frame = frame_that_tells(stacks[0].frames, library=places) if stacks else None
        return LastWords(where="" if frame is None else str(frame), fatal_error=fatal)
    if exception_at < 0:
        return LastWords()
    stamp, _, told = text[exception_at + len(EXCEPTION_MARK) :].partition("\n")
    error, _, traceback = told.strip().partition("\n")
    raised = traceback[max(0, traceback.rfind("Traceback (most recent call last):")) :]
    found = [_FRAME.match(line) for line in raised.splitlines()]
    frames = [Frame(match[1], int(match[2]), match[3]) for match in reversed(found) if match is not None]
    frame = frame_that_tells(frames, library=places)
    return LastWords(
        error=error.strip(),
        where="" if frame is None else str(frame),
        exception=traceback.strip(),
        raised_at_ns=int(stamp) if stamp.strip().isdigit() else 0,
    )
