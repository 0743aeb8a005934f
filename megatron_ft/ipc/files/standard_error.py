"""Lines on standard error. Who reads them may be stopped, or stuck: after a moment that isn't waited for."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable

from megatron_ft.ipc.files.file_thread import FileThread

_MOST_BYTES = 1 << 20
_WAIT_S = 0.1
_LAST_WAIT_S = 2.0


class StandardError:
    """Writes in a thread, in order. Lines for which there is no room while nothing is read are lost."""

    def __init__(self) -> None:
        self._thread = FileThread(_MOST_BYTES)

    def put(self, text: str) -> None:
        """Write these lines as they are, and return when they are written, or soon."""
        self._do(functools.partial(_write, text), len(text), _WAIT_S)

    def finish(self) -> None:
        """Wait for what isn't written yet, and then flush both streams; ``_LAST_WAIT_S`` seconds at most."""
        self._do(_flush, 0, _LAST_WAIT_S)

    def _do(self, job: Callable[[], None], size: int, bound_s: float) -> None:
        if self._thread.do(job, size):
            self._thread.wait(max(0.0, bound_s - self._thread.stands_for_s()))
        elif not self._thread.is_started():
            job()  # no thread can be started


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone ends no job; the event log has it
        print(text, file=sys.stderr, flush=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None: it was closed when Python started
            with contextlib.suppress(OSError, ValueError):  # its reader is gone
                stream.flush()


_STANDARD_ERROR = StandardError()
put = _STANDARD_ERROR.put
finish = _STANDARD_ERROR.finish
atexit.register(finish)
