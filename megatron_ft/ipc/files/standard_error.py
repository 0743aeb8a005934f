"""Lines on standard error. Their reader may be stopped or stuck: writing waits for it only briefly."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import sys

from megatron_ft.ipc.files.file_thread import FileThread

_MOST_CHARACTERS = 1 << 20
_WAIT_S = 0.1
_LAST_WAIT_S = 2.0


class StandardError:
    """Writes in a thread, in order. While nothing is read, lines for which there is no more room are only counted."""

    def __init__(self) -> None:
        self._pid = 0
        self._lost = 0

    def put(self, text: str) -> None:
        """Write these lines as they are, and return when they are written, or soon."""
        if self._pid != os.getpid():  # a fork has no thread
            self._pid, self._lost, self._thread = os.getpid(), 0, FileThread(_MOST_CHARACTERS)
        lines = f"({self._lost} lines lost: standard error was not read)\n{text}" if self._lost else text
        write = functools.partial(_write, lines)
        if self._thread.do(write, len(lines)):
            self._lost = 0
            self._wait(_WAIT_S)
        elif self._thread.is_started():
            self._lost += 1
        else:
            write()  # no thread can be started

    def finish(self) -> None:
        """Wait for what isn't written yet, ``_LAST_WAIT_S`` seconds at most."""
        if self._pid == os.getpid():
            self._wait(_LAST_WAIT_S)

    def _wait(self, bound_s: float) -> None:
        self._thread.wait(max(0.0, bound_s - self._thread.stands_for_s()))


def _write(text: str) -> None:
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone ends no job; the event log has it
        try:
            fd = stream.fileno()
        except (AttributeError, OSError, ValueError):  # none, or one of a test
            print(text, file=stream, flush=True)
            return
        # not by the stream: while it writes it holds a lock, for which an exit would wait
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
