"""``stamp(event)``: one line, with the time, in the file that the bench reads. Imports next to nothing.

A line is "RANK PID EVENT NUMBER NANOSECONDS", on the clock that all processes of a machine share.
"""

from __future__ import annotations

import os
import time

_fd = -1


def stamp(event: str, number: int = 0) -> None:
    """One append of one line: lines of several ranks don't mix, and one that is killed leaves no half of one."""
    global _fd
    if _fd < 0:  # where our ranks are forked: a time that was taken before would be the fork server's
        _fd = os.open(os.environ["FT_BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    now = time.monotonic_ns()
    os.write(_fd, f"{os.environ['RANK']} {os.getpid()} {event} {number} {now}\n".encode())


def stamp_imported() -> None:
    """The imports are done. The first line of all is before them, but to say so there is an act of one rank."""
    stamp("user")
    stamp("imported")
