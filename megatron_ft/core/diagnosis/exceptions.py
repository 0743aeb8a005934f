"""What a rank wrote about its own end: an uncaught exception, or its stacks at the signal that ended it. Pure.

And whether such an exception only says that another rank is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from megatron_ft.core.diagnosis.stacks import Frame, parse_faulthandler, user_frame

EXCEPTION_MARK = "Uncaught exception of the rank:"
"""Begins a line, with the time in nanoseconds, before the exception in one line, and its traceback."""
LEAVING_MARK = "Exception with which the rank left its loop:"
"""Mark before an exception with which a script has ended its monitoring; the process may go on, unwatched."""
_NO_MESSAGE = re.compile(r"([\w.]+):\s*")
"""An exception without a message, as ``f"{type}: {message}"`` has it."""
_FATAL_MARK = "Fatal Python error: "
_FRAME = re.compile(r'^[ |]+File "(.*)", line (\d+), in (.*)$')
"""A line of a traceback, also of one within an exception group, which draws its tree before it."""
_LOST_A_PEER = (
    "closed by peer",
    "reset by peer",
    "connection was closed",
    "connection refused",
    "socket closed",
    "broken pipe",
    "remote process exited",
    "communicator was aborted",
    "watchdog caught collective operation timeout",
    "timed out",
    "timeout",
    "failed to pass",
)
"""What gloo, NCCL and torch's store say, in lower case, when the other side of a collective is gone."""
_OF_A_COLLECTIVE = (
    *("gloo", "nccl", "c10d", "tcpstore", "processgroup", "monitoredbarrier"),
    *("distbackenderror", "distnetworkerror", "diststoreerror"),
)
"""Only with one of these is it theirs: a user's own connections break, too."""


class CrashOutput(NamedTuple):
    """What could be read; empty where nothing was written."""

    error: str = ""
    """Type and message, in one line."""
    where: str = ""
    """The innermost call in the user's code: "loader.py:88 next_batch"; of the exception, where there is one."""
    exception: str = ""
    """The traceback."""
    fatal_error: str = ""
    """The stacks that `faulthandler` wrote at a fatal signal."""
    crashed_at: str = ""
    """The innermost call in the user's code then."""
    raised_at_ns: int = 0
    """CLOCK_MONOTONIC; 0 where that isn't known."""
    raised_at_s: int | None = None
    """Whole seconds of the wall clock; None where that isn't known."""


def last_words(text: str, *, library: Iterable[str] = ()) -> CrashOutput:
    """Read the memory that a rank's crash reporter wrote. ``library`` as for ``user_frame``.

    An interpreter that ends of an exception may crash on its way out (a C++ thread that is never joined aborts the
    process): then there are both, and the place is that of the exception.
    """
    return _words(text, EXCEPTION_MARK, tuple(library))


def leaving_words(text: str, *, library: Iterable[str] = ()) -> CrashOutput:
    """Read the exception with which the script ended its monitoring from that memory; empty if there was none."""
    words = _words(text, LEAVING_MARK, tuple(library))
    return words if words.error else CrashOutput()


def exception_entry(mark: str, at_ns: int, error: str, traceback: str) -> str:
    """Return what a rank writes to that memory; ``mark`` is EXCEPTION_MARK or LEAVING_MARK."""
    return f"\n{mark} {at_ns}\n{error}\n{traceback}\n"


def _words(text: str, mark: str, places: tuple[str, ...]) -> CrashOutput:
    exception_at, fatal_at = text.rfind(mark), text.rfind(_FATAL_MARK)
    fatal = text[fatal_at:].strip() if fatal_at > exception_at else ""
    crashed_at = _where_crashed(fatal, places)
    if exception_at < 0:
        return CrashOutput(where=crashed_at, fatal_error=fatal, crashed_at=crashed_at)
    reported = text[exception_at + len(mark) : fatal_at if fatal else None]
    stamp, _, rest = reported.partition("\n")
    error, _, traceback = rest.strip().partition("\n")
    return CrashOutput(
        error=without_empty_message(error.strip()),
        where=_where_raised(traceback, places),
        exception=traceback.strip(),
        fatal_error=fatal,
        crashed_at=crashed_at,
        raised_at_ns=int(stamp) if stamp.strip().isdigit() else 0,
    )


def words_of_error_file(text: str, *, library: Iterable[str] = ()) -> CrashOutput:
    """Read what torch's error handler, or this package's in its format, wrote for a rank that raised."""
    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return CrashOutput(error=without_empty_message(message))
        error, more = str(message["message"]), message["extraInfo"]
        raised_at_s, traceback = int(more["timestamp"]), str(more.get("py_callstack", "")).strip()
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return CrashOutput()  # none was written, or the rank was ended while it wrote
    where = _where_raised(traceback, tuple(library))
    return CrashOutput(error=without_empty_message(error), where=where, exception=traceback, raised_at_s=raised_at_s)


def without_empty_message(error: str) -> str:
    """Return "type: message" as it is, and "type:" without the colon."""
    alone = _NO_MESSAGE.fullmatch(error)
    return error if alone is None else alone[1]


def is_peer_loss(error: str) -> bool:
    """Whether an exception, "type: message", is what a collective raises when its other side is gone."""
    text = error.lower()
    return any(name in text for name in _OF_A_COLLECTIVE) and any(sign in text for sign in _LOST_A_PEER)


def _where_crashed(fatal: str, library: tuple[str, ...]) -> str:
    # the thread that died is the current one; if that isn't one of Python's, where it was isn't known
    at = fatal.find("Current thread 0x")
    stacks = parse_faulthandler(fatal[at:]) if at >= 0 else []
    frame = user_frame(stacks[0].frames, library=library) if stacks else None
    return "" if frame is None else str(frame)


def _where_raised(traceback: str, library: tuple[str, ...]) -> str:
    raised = traceback[max(0, traceback.rfind("Traceback (most recent call last):")) :]
    found = [_FRAME.match(line) for line in raised.splitlines()]
    frames = [Frame(match[1], int(match[2]), match[3]) for match in reversed(found) if match is not None]
    frame = user_frame(frames, library=library)
    return "" if frame is None else str(frame)
