"""What the ranks import, as the first rank of this node reports it, and when they have paused for a while."""

from __future__ import annotations

import os
from collections.abc import Callable

from megatron_ft.core.preload import LearnedImport
from megatron_ft.launcher.reactor import Reactor, Timer

__all__ = ["LearnedImports"]

_PAUSE_S = 0.3
"""Ranks that import nothing for so long are past their imports, or in between two heaps of them."""
_LONGEST_PAUSE_S = 60.0
_CHUNK = 1 << 16


class LearnedImports:
    """Reads the reports; ``modules`` are in the order of their first import."""

    def __init__(self, reactor: Reactor, *, on_pause: Callable[[], None]) -> None:
        """``on_pause`` is called after new modules and a pause. Each pause must be longer than the last one."""
        self.modules: list[LearnedImport] = []
        self._known: set[str] = set()
        self._reactor = reactor
        self._on_pause = on_pause
        self._pause_s = _PAUSE_S
        self._timer: Timer | None = None
        self._fd = -1
        self._rest = b""

    def begin(self) -> int:
        """A new first rank: the descriptor that it writes to, the caller's to close once the rank has it."""
        self._close_pipe()
        self._fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pause_s = _PAUSE_S
        self._reactor.watch(self._fd, self._read)
        return write_fd

    def close(self) -> None:
        """Hear no more."""
        self._close_pipe()
        if self._timer is not None:
            self._timer.cancel()

    def _read(self) -> None:
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._close_pipe()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        before = len(self.modules)
        for line in lines:
            self._take(line.decode(errors="surrogateescape"))
        if len(self.modules) > before:
            self._wait_for_pause()

    def _take(self, line: str) -> None:
        name, _, origin = line.partition("\t")
        # a rank may write what it likes; what is no module's name isn't imported
        if name not in self._known and origin and all(part.isidentifier() for part in name.split(".")):
            self._known.add(name)
            self.modules.append(LearnedImport(name, origin))

    def _wait_for_pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._reactor.call_later(self._pause_s, self._paused)

    def _paused(self) -> None:
        self._timer = None
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._on_pause()

    def _close_pipe(self) -> None:
        self._rest = b""
        if self._fd >= 0:
            self._reactor.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
