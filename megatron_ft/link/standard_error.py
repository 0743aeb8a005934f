"""Lines on standard error. Writes wait only briefly for a reader that is stopped or stuck."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import sys

from megatron_ft.link.file_queue import FileQueue

MOST_CHARACTERS = 1 << 20
_WAIT_S = 0.1
_LAST_WAIT_S = 2.0


class StandardError:
    """Writes in a thread, in order. When its room is used up because nothing is read, lines are dropped and counted."""

    def __init__(self) -> None:
        self._pid = 0
        self._lost = 0

    def put(self, text: str) -> None:
        """Write these lines as they are. Return once they are written, or after a short wait."""
        if self._pid != os.getpid():  # a fork has no thread
            self._pid, self._lost, self._thread = os.getpid(), 0, FileQueue(MOST_CHARACTERS)
        lines = f"({self._lost} lines lost: standard error was not read)\n{text}" if self._lost else text
        write = functools.partial(_write, lines)
        if self._thread.do(write, len(lines)):
            self._lost = 0
            self._thread.wait(_WAIT_S)
        elif self._thread.is_started():
            self._lost += 1
        else:
            write()  # no thread can be started

    def finish(self) -> None:
        """Wait up to ``_LAST_WAIT_S`` seconds for unwritten lines."""
        if self._pid == os.getpid():
            self._thread.wait(_LAST_WAIT_S)


def _write(text: str) -> None:
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone ends no job; the event log has the lines
        try:
            fd = stream.fileno()
        except (AttributeError, OSError, ValueError):  # no stream, or one of a test
            print(text, file=stream, flush=True)
            return
        # not by the stream, which holds a lock while it writes: an exit would wait for it
        unwritten = f"{text}\n".encode(stream.encoding or "utf-8", "backslashreplace")
        while unwritten:
            try:
                unwritten = unwritten[os.write(fd, unwritten) :]
            except BlockingIOError:
                room = select.poll()
                room.register(fd, select.POLLOUT)
                room.poll()


_STANDARD_ERROR = StandardError()
put = _STANDARD_ERROR.put
finish = _STANDARD_ERROR.finish
atexit.register(finish)
