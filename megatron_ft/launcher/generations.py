"""The fork servers of a node: the one that is forked from, the next one that still imports, and those that died."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence

from megatron_ft.core.preload import (
    FORK_SERVER_NAME,
    KNOWN_TO_READ_RANK,
    LearnedImport,
    differing_variables,
    to_preload,
    without,
)
from megatron_ft.ipc.event_log import EventLog
from megatron_ft.launcher import lines
from megatron_ft.launcher.descendants import end_strays, is_stopped
from megatron_ft.launcher.reactor import Priority, Reactor, Timer
from megatron_ft.launcher.server_process import ServerError, ServerProcess, start_by_argv

__all__ = ["Generations"]

_MOST_ATTEMPTS = 12
"""Modules that are left out before learning is given up: each costs the imports up to it once more."""
_MOST_DEATHS = 5
"""Servers that may die before none is started any more."""
_STOPPED_FOR_S = 0.1


class Generations:
    """Never more than one serves and one grows. A server that imports anything is a fork, so none is ever spoiled."""

    def __init__(
        self,
        first: ServerProcess | None,
        *,
        preload: Sequence[str],
        timeout_s: float,
        reactor: Reactor,
        log: EventLog,
        say: Callable[[str], None],
        known_children: Callable[[], Collection[int]],
    ) -> None:
        """``preload`` are the names that the user asked for; ``timeout_s`` is how long one import may take.

        ``known_children`` of the launcher, these servers included, are no strays.
        """
        self.current: ServerProcess | None = None
        self._next: ServerProcess | None = None
        self._old: list[ServerProcess] = []
        self._preload = tuple(preload)
        self._wanted: list[tuple[str, str | None]] = []
        self._learned: list[LearnedImport] = []
        self._roots: Sequence[str] = ()
        self._dropped: dict[str, str] = {}
        self._script_dir: str | None = None
        self._timeout_s = timeout_s
        self._timer: Timer | None = None
        self._attempts = self._deaths = 0
        self._closed = False
        self._reactor = reactor
        self._log = log
        self._say = say
        self._known_children = known_children
        if first is not None:
            self._make_current(first)

    @property
    def is_growing(self) -> bool:
        """Whether a better server is on its way."""
        return self._next is not None or (self.current is not None and not self.current.is_ready)

    def begin(self, script_dir: str) -> None:
        """The ranks' scripts lie there. Start a server if none runs, and have it import what the user asked for."""
        self._script_dir = script_dir
        if self.current is not None and differing_variables(self.current.environment, os.environ):
            self._old.append(self.current)  # made before anybody knew the number of ranks
            self.current.kill()
            self.current = None
        if self.current is None:
            self._start_fresh()
        self._grow_if_wanted()

    def grow(self, learned: Sequence[LearnedImport], *, roots: Sequence[str]) -> None:
        """Have these modules imported too, those of them that are installed."""
        self._learned, self._roots = list(learned), roots
        self._grow_if_wanted()

    def pids(self) -> set[int]:
        """Of all servers that aren't reaped."""
        return {server.pid for server in self._all()}

    def replace_if_stopped(self, *, again: bool = False) -> None:
        """A server that is stopped is looked at twice: when a whole node is continued, we may be so before it."""
        stopped = [server for server in self._all() if is_stopped(server.pid)]
        if stopped and not again:
            self._reactor.call_later(_STOPPED_FOR_S, lambda: self.replace_if_stopped(again=True))
        elif again:
            for server in stopped:
                server.kill()  # its end is seen like any other

    def retire(self) -> None:
        """End all of them, and don't wait for that."""
        self._closed = True
        self._cancel_timer()
        for server in self._all():
            server.kill()

    def close(self) -> None:
        """End all of them."""
        self.retire()
        self._reactor.run_until(lambda: not self._all(), deadline_s=time.monotonic() + 5.0)

    # -- growing ------------------------------------------------------------------------------------------

    def _grow_if_wanted(self) -> None:
        wanted: list[tuple[str, str | None]] = [(name, None) for name in self._preload if name not in self._dropped]
        left_out = {*self._dropped, *KNOWN_TO_READ_RANK}
        learned = to_preload(self._learned, roots=self._roots, dropped=left_out)
        wanted += [(module.name, module.origin) for module in learned]
        is_new = bool(set(wanted).difference(self._wanted))
        if self._closed or self._next is not None or not is_new or self._attempts >= _MOST_ATTEMPTS:
            return
        server = self.current
        if server is None or not server.is_ready:
            return  # asked for again when it is
        try:
            expected = {module.name: module.origin for module in self._learned}
            self._next = server.grow(wanted, expected=expected, script_dir=self._script_dir)
        except (ServerError, OSError) as error:
            self._log.write("fork_server", state="not grown", pid=server.pid, reason=str(error))
            return
        self._wanted = wanted
        self._watch(self._next)
        self._timer = self._reactor.call_later(self._timeout_s, self._check_progress)

    def _check_progress(self) -> None:
        """End a server that imports one and the same module for too long."""
        server = self._next
        if server is None:
            return
        left = server.since_s + self._timeout_s - time.monotonic()
        if left > 0:
            self._timer = self._reactor.call_later(left, self._check_progress)
            return
        server.unfit = (server.importing, f"its import took longer than {self._timeout_s:g} s")
        server.kill()

    def _take(self, server: ServerProcess) -> None:
        was_ready = server.is_ready
        server.read()
        if server.is_ready and not was_ready:
            self._became_ready(server)

    def _became_ready(self, server: ServerProcess) -> None:
        self._log.write(
            "fork_server",
            state="ready",
            pid=server.pid,
            took_s=round(time.monotonic() - server.started_s, 3),
            failed=server.failed,
        )
        for name in self._preload:
            if name in server.failed and name not in self._dropped:
                self._drop(name, server.failed[name])
        if server is self._next:
            self._cancel_timer()
            self._next, before = None, self.current
            self.current = server
            if before is not None:
                self._old.append(before)
                before.kill()
        self._grow_if_wanted()

    def _drop(self, name: str, reason: str) -> None:
        self._dropped[name] = reason
        self._log.write("fork_server", state="left out", module=name, reason=reason)
        if name in self._preload:
            self._say(lines.preload_left_out(name, reason))

    # -- living and dying ---------------------------------------------------------------------------------

    def _start_fresh(self) -> None:
        try:
            self._make_current(start_by_argv(["torch"]))
        except OSError as error:
            self._log.write("fork_server", state="not started", reason=str(error))

    def _make_current(self, server: ServerProcess) -> None:
        self.current = server
        self._watch(server)

    def _watch(self, server: ServerProcess) -> None:
        self._log.write("fork_server", state="started", pid=server.pid)
        server.on_channel_closed = lambda: self._reactor.unwatch(server.channel_fd)
        self._reactor.watch(server.channel_fd, lambda: self._take(server))
        self._reactor.watch(server.pidfd, lambda: self._ended(server), Priority.DEATH)

    def _ended(self, server: ServerProcess) -> None:
        self._reactor.unwatch(server.pidfd)
        server.read()  # its last words
        if server.channel.fileno() >= 0:
            self._reactor.unwatch(server.channel_fd)
        code = server.reap()
        # what it had just forked, and we haven't heard of: it ends by itself, but not if it was stopped, too
        end_strays(FORK_SERVER_NAME, self._known_children)
        self._log.write("fork_server", state="ended", pid=server.pid, exit_code=code)
        if server in self._old:
            self._old.remove(server)
        elif server is self._next:
            self._next = None
            self._cancel_timer()
            self._learn_from(server)
        elif server is self.current:
            self.current = None
            if not self._closed:
                self._replace(server, code)

    def _learn_from(self, failed: ServerProcess) -> None:
        """A server that was to be the next one has failed: leave out what made it, and try again."""
        if self._closed:
            return
        self._attempts += 1
        self._wanted = []
        culprit, reason = failed.unfit or (failed.importing, "the fork server died while it was imported")
        if culprit is None:
            self._attempts = _MOST_ATTEMPTS
            if self._preload:
                self._say(lines.preload_left_out(", ".join(self._preload), reason))
            self._log.write("fork_server", state="stays as it is", reason=reason)
            return
        self._drop(without(culprit, self._preload), reason)
        self._grow_if_wanted()

    def _replace(self, server: ServerProcess, code: int) -> None:
        self._deaths += 1
        self._wanted = []
        if server.unfit is not None:
            self._say(lines.fresh_interpreters(f"{server.unfit[1]} when torch was imported"))
        elif self._deaths >= _MOST_DEATHS:
            self._say(lines.no_more_fork_servers(self._deaths))
        else:
            self._say(lines.fork_server_replaced(code))
            self._start_fresh()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _all(self) -> Collection[ServerProcess]:
        return [server for server in (self.current, self._next, *self._old) if server is not None]
