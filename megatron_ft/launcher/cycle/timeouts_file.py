"""The file of learned timeouts, read and written in a thread: a stuck file server must not stop the launcher."""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from megatron_ft.core.agent import edge
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.timeouts.exchange import Moment
from megatron_ft.core.timeouts.ft_state_document import NewerStateError, file_document, parse
from megatron_ft.core.timeouts.learned import LearnedState
from megatron_ft.ipc.files.state_file import (
    BrokenStateFile,
    UnreadableStateFile,
    read_state,
    set_aside,
    write_state,
)
from megatron_ft.link.file_queue import FileQueue
from megatron_ft.link.reactor import Reactor

_LAST_WRITE_S = 2.0
"""Seconds the launcher's exit waits for a write."""

Result = edge.StateRead | edge.StateWritten


class TimeoutsFile:
    """Learned timeouts of one launcher. ``hear`` gets each result, on the launcher's loop."""

    def __init__(self, reactor: Reactor, hear: Callable[[Result], None], configured: Mapping[str, Any]) -> None:
        self._reactor = reactor
        self._hear = hear
        self._configured = configured
        self._thread = FileQueue()
        self._results: deque[Result] = deque()
        self._done_fd = -1

    def act(self, effect: edge.ReadState | edge.WriteState) -> None:
        """Start reading or writing; the result goes to ``hear``."""
        match effect:
            case edge.ReadState(path, sets_aside):
                failed: Result = edge.StateRead(path, None, f"{path} can't be read: no thread is left", may_write=False)
                self._do(functools.partial(read, path, sets_aside=sets_aside), failed)
            case edge.WriteState(path, state, moment):
                failed = edge.StateWritten(False, f"{path} can't be written: no thread is left", moment)
                self._do(functools.partial(write, path, state, self._configured, moment), failed)

    def close(self) -> None:
        """Wait up to 2 s for a write in progress."""
        self._thread.finish(_LAST_WRITE_S)
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


def read(path: str, *, sets_aside: bool) -> edge.StateRead:
    """Read the file. A file that was read and does not parse is renamed if ``sets_aside``."""
    try:
        document = read_state(path)
        return edge.StateRead(path, None if document is None else parse(document))
    except (UnreadableStateFile, NewerStateError) as error:
        text = f"{path} {error}: leaving it alone, timeouts learned in this run are not written"
        return edge.StateRead(path, None, text, may_write=False)
    except (BrokenStateFile, ConfigError) as error:
        if not sets_aside:
            return edge.StateRead(path, None, f"{path} {error}: leaving it alone")
        try:
            return edge.StateRead(path, None, f"{path} {error}: moved to {set_aside(path)}")
        except OSError as refused:
            text = f"{path} {error}, and can't be moved away ({refused.strerror})"
            return edge.StateRead(path, None, f"{text}: timeouts learned in this run are not written", may_write=False)


def write(path: str, state: LearnedState, configured: Mapping[str, Any], moment: Moment | None) -> edge.StateWritten:
    """Write the file, creating its directory if needed."""
    try:
        directory = os.path.dirname(path)
        if directory:
            os.makedirs(directory, exist_ok=True)
        write_state(path, file_document(replace(state, written_at_unix_s=time.time()), configured))
    except OSError as error:
        return edge.StateWritten(False, f"learned timeouts can't be written to {path}: {error.strerror}", moment)
    return edge.StateWritten(True, "", moment)
