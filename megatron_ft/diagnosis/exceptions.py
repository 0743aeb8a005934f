"""A rank's own report of its end: an uncaught exception, or its stacks at a fatal signal. Pure.

Also decides whether an exception only means that another rank is gone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_ft.diagnosis.rank_snapshot import stack_wait
from megatron_ft.diagnosis.stacks import Frame, parse_faulthandler, user_frame
from megatron_ft.link.base.rerun import RerunState, rerun_state

EXCEPTION_MARK = "Uncaught exception of the rank:"
"""Begins a line, with the time in nanoseconds, before the exception in one line, and its traceback."""
LEAVING_MARK = "Exception with which the rank left its loop:"
"""Mark before an exception with which a script has ended its monitoring; the process may go on, unwatched."""
THREAD_MARK = "Exception that ended a thread of the rank:"
"""Begins a line, before one with the thread and its exception."""
EXITING_MARK, EXITED_MARK = "The rank's interpreter exits.", "The rank's exit handlers have run."
"""Lines written when the script and all its threads have ended, and after the exit handlers that the script added."""
_NO_MESSAGE = re.compile(r"([\w.]+):\s*")
"""Exception without a message, as ``f"{type}: {message}"`` formats it."""
_FATAL_MARK = "Fatal Python error: "
_FRAME = re.compile(r'^[ |]+File "(.*)", line (\d+), in (.*)$')
"""A line of a traceback, also of one within an exception group, which draws its tree before it."""
_MOST_THREADS = 8
_TRACEBACK = "Traceback (most recent call last):"
_LAST_ERROR = re.compile(r"^(?!During |The above )([A-Za-z_][\w.]*(?::.*)?)\Z", re.MULTILINE | re.DOTALL)
"""Type and message after a traceback, whose own lines are indented."""
_TERMINATED = re.compile(r"^terminate called after throwing an instance of '(.+)'\n +what\(\): +(.+)$", re.MULTILINE)
_CHECKED = re.compile(r"\[enforce fail at \S+\] ")
_LOST_A_PEER = (
    "closed by peer",
    "closed by remote peer",
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
"""Messages, in lower case, of gloo, NCCL and torch's store when the other side of a collective is gone."""
_GAVE_UP = re.compile(
    r"(?:timed out|timeout|failed to pass)\D{0,60}?\b(\d+(?:\.\d+)?) ?(ms|milli|s\b|sec)"
    r"|(?:ran for|timeout\(ms\)=) ?(\d+(?:\.\d+)?) ?(ms|milli|s\b|sec)?",
    re.IGNORECASE,
)
_HOW_LOST = {
    "closed": "closed",
    "reset": "reset",
    "refused": "refused",
    "broken pipe": "reset",
    "status=": "failed",
    "timed out": "timed out",
    "timeout": "timed out",
}
_OF_A_COLLECTIVE = (
    *("gloo", "nccl", "c10d", "tcpstore", "processgroup", "monitoredbarrier"),
    *("distbackenderror", "distnetworkerror", "diststoreerror"),
)
"""Names of which one must occur, too: a user's own connections break as well."""


class CrashOutput(NamedTuple):
    """Parsed report; fields are empty if nothing was written."""

    error: str = ""
    """Type and message, in one line."""
    where: str = ""
    """Innermost call in the user's code, "loader.py:88 next_batch"; of the exception, if there is one."""
    exception: str = ""
    """Traceback."""
    fatal_error: str = ""
    """Stacks that `faulthandler` wrote at a fatal signal."""
    crashed_at: str = ""
    """Innermost call in the user's code at that signal."""
    raised_at_ns: int = 0
    """CLOCK_MONOTONIC; the latest possible time where it is known in whole seconds, 0 if unknown."""
    rerun: RerunState | None = None
    """The state of Megatron's rerun state machine at the exit; None if the rank has written none."""
    terminated_by: str = ""
    """C++ exception that aborted the process, as its standard error says, where that is a file."""
    exiting: bool = False
    """The script and its threads had ended, not by an exception with which the script left its loop."""
    exited: bool = False
    """The exit handlers that the script had added had run."""
    unread: bool = False
    """The error file could not be read, and nothing else tells of an exception."""


def last_words(text: str, *, library: Iterable[str] = (), mark: str = EXCEPTION_MARK) -> CrashOutput:
    """Read the memory that a rank's crash reporter wrote. ``library`` as for ``user_frame``.

    An interpreter that ends of an exception may crash on its way out (a C++ thread that is never joined aborts the
    process): then both are reported, with the place of the exception.
    """
    places = tuple(library)
    exception_at, fatal_at = text.rfind(mark), text.rfind(_FATAL_MARK)
    fatal = text[fatal_at:].strip() if fatal_at > exception_at else ""
    # the crashed thread is the current one; if it isn't a Python thread, its place is unknown
    at = fatal.find("Current thread 0x")
    stacks = parse_faulthandler(fatal[at:]) if at >= 0 else []
    crashed_at = _place(stacks[0].frames if stacks else (), places)
    words = CrashOutput(
        where=crashed_at,
        fatal_error=fatal,
        crashed_at=crashed_at,
        rerun=rerun_state(text),
        exiting=EXITING_MARK in text and LEAVING_MARK not in text,
        exited=EXITED_MARK in text,
    )
    if exception_at < 0:
        return words
    reported = text[exception_at + len(mark) : fatal_at if fatal else None]
    stamp, _, rest = reported.partition("\n")
    error, _, traceback = rest.strip().partition("\n")
    return words._replace(
        error=without_empty_message(error.strip()),
        where=_place(_frames(traceback), places),
        exception=traceback.strip(),
        raised_at_ns=int(stamp) if stamp.strip().isdigit() else 0,
    )


def lost_threads(text: str) -> tuple[str, ...]:
    """Return the threads that have died: "thread loader, which died of KeyError: 'a', in a.py:3 load"."""
    found = re.findall(rf"^{re.escape(THREAD_MARK)} \d+\n(.+)$", text, re.MULTILINE)
    return tuple(found[-_MOST_THREADS:])


def exception_entry(mark: str, at_ns: int, error: str, traceback: str) -> str:
    """Return what a rank writes to that memory; ``mark`` is EXCEPTION_MARK or LEAVING_MARK."""
    return f"\n{mark} {at_ns}\n{error}\n{traceback}\n"


def words_of_error_file(text: str, *, wall_offset_ns: int = 0, library: Iterable[str] = ()) -> CrashOutput:
    """Read the error file of a rank that raised, written by torch's error handler or in its format.

    ``wall_offset_ns``: time of the wall clock minus CLOCK_MONOTONIC.
    """
    try:
        message = json.loads(text)["message"]
        if isinstance(message, str):
            return CrashOutput(error=without_empty_message(innermost_error(message)))
        error, more = str(message["message"]), message["extraInfo"]
        second, traceback = int(more["timestamp"]), str(more.get("py_callstack", "")).strip()
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return CrashOutput()  # none was written, or the rank was ended while it wrote
    return CrashOutput(
        error=without_empty_message(innermost_error(error)),
        where=_place(_frames(traceback), library),
        exception=traceback,
        raised_at_ns=max(0, (second + 1) * 10**9 - wall_offset_ns),
    )


def terminated_by(stderr: str) -> str:
    """Return the last C++ exception that nothing caught, "gloo::EnforceNotMet: ..."; empty if there is none."""
    found = _TERMINATED.findall(stderr)
    return " ".join(_CHECKED.sub("", ": ".join(found[-1])).split()) if found else ""


def without_empty_message(error: str) -> str:
    """Return "type: message" unchanged, and "type:" without the colon."""
    alone = _NO_MESSAGE.fullmatch(error)
    return error if alone is None else alone[1]


def innermost_error(error: str) -> str:
    """Return the last "type: message" of an exception whose message has the traceback of another one.

    So a data loader reports what its worker raised. Other texts are returned unchanged.
    """
    at = error.rfind(_TRACEBACK)
    found = None if at < 0 else _LAST_ERROR.search(error.rstrip(), at + len(_TRACEBACK))
    return error if found is None else found[1]


def is_peer_loss(error: str) -> bool:
    """Return True if an exception, "type: message", is what a collective raises when its other side is gone."""
    text = error.lower()
    return any(name in text for name in _OF_A_COLLECTIVE) and any(sign in text for sign in _LOST_A_PEER)


def waited_s(error: str) -> float | None:
    """Return the seconds after which a collective or a store gave up waiting; None if the error names none.

    A connection that was closed, reset or refused proves nothing about time.
    """
    found = _GAVE_UP.search(error)
    if found is None:
        return None
    number, unit = found[1] or found[3], found[2] or found[4] or "ms"
    return float(number) / (1000 if unit.startswith("m") else 1)


def connection_loss(error: str) -> str:
    """Return how a collective lost its connection, in short: "gloo connection reset"."""
    text = error.lower()
    library = next((name for name in ("gloo", "nccl", "tcpstore") if name in text), "torch.distributed")
    how = next((how for sign, how in _HOW_LOST.items() if sign in text), "lost")
    return f"{library} connection {how}"


def _place(frames: Sequence[Frame], library: Iterable[str]) -> str:
    frame = user_frame(frames, library=library)
    return "" if frame is None else str(frame)


def collective_raised_in(traceback: str) -> str:
    """Return the collective in which an exception was raised: "all_reduce"; empty if in none."""
    return stack_wait(_frames(traceback))


def _frames(traceback: str) -> list[Frame]:
    """Return the calls of the last exception in a traceback, innermost first."""
    raised = traceback[max(0, traceback.rfind(_TRACEBACK)) :]
    found = [_FRAME.match(line) for line in raised.splitlines()]
    return [Frame(match[1], int(match[2]), match[3]) for match in reversed(found) if match is not None]
