"""The file of learned timeouts, read and written in a thread: a stuck file server must not stop the launcher."""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from megatron_ft.core.errors import ConfigError
from megatron_ft.ipc.files.state_file import (
    BrokenStateFile,
    UnreadableStateFile,
    read_state,
    set_aside,
    write_state,
)
from megatron_ft.learning.launcher_part import LearningOptions, ReadState, StateRead, StateWritten, WriteState
from megatron_ft.learning.state import NewerStateError, file_document, parse
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.reactor import Reactor

LAST_WRITE_S = 2.0
"""Seconds the launcher's exit waits for a write."""

Result = StateRead | StateWritten


class TimeoutsFile:
    """Learned timeouts of one launcher. ``hear`` gets each result, on the launcher's loop."""

    def __init__(self, reactor: Reactor, hear: Callable[[Result], None], options: LearningOptions) -> None:
        self._reactor = reactor
        self._hear = hear
        self._options = options
        self._thread = FileQueue()
        self._results: deque[Result] = deque()
        self._done_fd = -1

    def act(self, effect: ReadState | WriteState) -> None:
        """Start reading or writing; the result goes to ``hear``."""
        match effect:
            case ReadState(path, sets_aside):
                failed: Result = StateRead(path, None, f"{path} can't be read: no thread is left", may_write=False)
                self._do(functools.partial(read, path, sets_aside=sets_aside), failed)
            case WriteState(path, _, moment):
                failed = StateWritten(False, f"{path} can't be written: no thread is left", moment)
                self._do(functools.partial(write, effect, self._options), failed)

    def close(self) -> None:
        """Wait up to 2 s for a write in progress."""
        self._thread.finish(LAST_WRITE_S)
        if self._done_fd >= 0:
            self._reactor.unwatch(self._done_fd)
            # stays open: a hung read may still end, and must not wake a descriptor with the same number

    def _do(self, job: Callable[[], Result], failed: Result) -> None:
        if self._done_fd < 0:
            self._done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._reactor.watch(self._done_fd, self._take)
        if not self._thread.do(functools.partial(self._run, job)):
            self._post(failed)

    def _run(self, job: Callable[[], Result]) -> None:
        self._post(job())

    def _post(self, result: Result) -> None:
        self._results.append(result)
        os.eventfd_write(self._done_fd, 1)

    def _take(self) -> None:
        os.eventfd_read(self._done_fd)
        while self._results:
            self._hear(self._results.popleft())


def read(path: str, *, sets_aside: bool) -> StateRead:
    """Read the file. A file that was read and does not parse is renamed if ``sets_aside``."""
    try:
        document = read_state(path)
        return StateRead(path, None if document is None else parse(document))
    except (UnreadableStateFile, NewerStateError) as error:
        text = f"{path} {error}: leaving it alone, timeouts learned in this run are not written"
        return StateRead(path, None, text, may_write=False)
    except (BrokenStateFile, ConfigError) as error:
        if not sets_aside:
            return StateRead(path, None, f"{path} {error}: leaving it alone")
        try:
            return StateRead(path, None, f"{path} {error}: moved to {set_aside(path)}")
        except OSError as refused:
            text = f"{path} {error}, and can't be moved away ({refused.strerror})"
            return StateRead(path, None, f"{text}: timeouts learned in this run are not written", may_write=False)


def write(wanted: WriteState, options: LearningOptions) -> StateWritten:
    """Write the file, creating its directory if needed."""
    path = wanted.path
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        state = replace(wanted.state, written_at_unix_s=time.time())
        write_state(path, file_document(state, options.configured, options.floor_s))
    except OSError as error:
        return StateWritten(False, f"learned timeouts can't be written to {path}: {error.strerror}", wanted.moment)
    return StateWritten(True, "", wanted.moment)
