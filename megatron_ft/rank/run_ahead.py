"""A script that is run ahead: up to its first act that ranks can't share, where it waits to be forked for each of them.

``startup/sitecustomize.py`` calls ``begin`` before the script's first line. The script then runs as ever, until
``stop`` is called in the middle of something: that call returns in each rank, and never here. The launcher holds the
other end of a socket pair; its end ends this process. Ranks are children of the launcher, made by forking twice: the
launcher is child subreaper, and adopts what the process in between leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from megatron_ft.core.preload import FORK_SERVER_NAME, RUN_AHEAD_VARIABLE
from megatron_ft.ipc.prctl import die_with_parent, set_name
from megatron_ft.ipc.resolver import ask_again_soon
from megatron_ft.ipc.wire import Channel, ChannelClosedError, Message, close_fds
from megatron_ft.rank.acting import place
from megatron_ft.rank.double_fork import Begun, begin_fork, finish_fork
from megatron_ft.rank.error_file import write_error_file
from megatron_ft.rank.huge_pages import collapse_memory
from megatron_ft.rank.sharing import descriptors, identity, into_streams, separate, why_not_shared
from megatron_ft.rank.user_code import note_user_code
from megatron_ft.rank.watching import Watch

__all__ = ["begin", "stop"]

_IDLE_MS: float = 1000.0
_PATIENCE_S = 3600.0
_DONE = object()
# as they are before anything stands in for them
_exit, _getpid, _environ = os._exit, os.getpid, os.environ

_ahead: RunAhead | None = None


def begin(known: set[str]) -> None:
    """Watch this process from here on. ``known``: modules that a script finds imported already anyway."""
    global _ahead
    orders = json.loads(os.environ.pop(RUN_AHEAD_VARIABLE))
    if orders["python_path"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = orders["python_path"]
    _ahead = RunAhead(orders)
    _ahead.begin()
    _forget_hidden(known, orders["first_in_path"])
    _ahead.preload(orders["preload"], orders["first_in_path"])


def stop(what: str) -> None:
    """The script is about to do ``what``: wait here, if it is run ahead. Returns in a rank, or if it isn't."""
    if _ahead is not None:
        _ahead.stop(what)


def _forget_hidden(known: set[str], directory: str) -> None:
    """A script finds its own ``queue.py``, though we have imported Python's."""
    for name in sys.modules.keys() - known:
        top = name.partition(".")[0]
        spec = None if top == "megatron_ft" else PathFinder.find_spec(top, [directory])
        if spec is not None and spec.origin is not None:
            del sys.modules[name]


class RunAhead:
    """The one of this process."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._began_s = time.monotonic()
        self._pid = _getpid()
        self._launcher_pid: int = orders["launcher"]
        self._channel = Channel(socket.socket(fileno=orders["fd"]))
        self._captured = os.dup(1), os.dup(2)
        self._own_fds = {orders["fd"], *self._captured}
        self._given = set(map(identity, (0, *self._captured)))
        self._watch = Watch(self.stop)
        self._has_stopped = self._is_rank = False
        self._script_fds: set[int] = set()
        self._threads: list[Any] = []
        self._asks_for: str | None = None
        self._blocked: set[int] = set()
        self._terminals: list[int] = orders["terminals"]
        self._claimed: list[Any] = []
        self._name = b""
        self._on_child: Any = None

    def begin(self) -> None:
        """From here on nothing happens unseen."""
        die_with_parent()
        if os.getppid() != self._launcher_pid:
            _exit(0)
        # one that comes to a rank before it is one waits
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        ask_again_soon()
        atexit.register(gc.unfreeze)  # else libraries find objects alive at the end, and say that they leak
        threading._register_atexit(self._write_error)  # type: ignore[attr-defined]
        self._gate_fork_handlers()
        self._watch_input()
        self._claim_terminals()
        self._watch.begin()

    def preload(self, names: list[str], directory: str) -> None:
        """Import what the user asked for, before the script."""
        sys.path.insert(0, directory)
        for name in names:
            self._asks_for = name
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit included
                self._tell({"type": "left_out", "name": name, "reason": f"{type(error).__name__}: {error}"})
        self._asks_for = None
        sys.path.remove(directory)

    def stop(self, what: str) -> None:
        """Wait here, for good, and fork ranks; returns in those. What this process forks itself isn't concerned."""
        if self._has_stopped or _getpid() != self._pid:
            return
        if gc.isenabled():
            gc.collect(1)  # what is garbage by now would never be collected; while it is, its own acts are watched
        if self._is_rank:
            return  # one of them was the first that can't be shared
        self._has_stopped = True
        try:
            self._become(*self._wait(what))
        except BaseException as error:  # noqa: BLE001 - whatever it is: the script would catch it, and go on unwatched
            self._break_off(error)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)  # a signal that has waited comes now

    def _wait(self, what: str) -> tuple[Message, tuple[int, ...]]:
        """Stop watching, tell the launcher, and serve; returns only in a rank, with what it is to be."""
        took_s = time.monotonic() - self._began_s
        where = place(sys._getframe(2)) or (f"--ft-preload {self._asks_for}" if self._asks_for else "")
        self._watch.end()
        self._watch.looked.note_modules()
        self._watch.looked.note_open()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # after a fork Python takes all others for ended, those too that were never started
        self._threads = [*threading._dangling]  # type: ignore[attr-defined]
        threading._dangling.clear()  # type: ignore[attr-defined]
        point = {"where": where, "what": what, "took_s": took_s}
        self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel may reap what we wait for
        reason = self._watch.randomness.why_spoiled() or why_not_shared(self._own_fds, self._given)
        if reason is not None:
            self._tell({"type": "unfit", "reason": reason, **point})
            _exit(0)
        self._script_fds = descriptors(self._own_fds)
        self._name = set_name(FORK_SERVER_NAME.encode())
        gc.freeze()  # a collection in a rank would else copy every page that it looks at
        self._tell({"type": "ready", **point})
        return self._serve()

    def _break_off(self, error: BaseException) -> NoReturn:
        sys.__excepthook__(type(error), error, error.__traceback__)
        reason = f"{type(error).__name__}: {error}"
        self._tell({"type": "unfit", "reason": reason, "where": "", "what": "", "took_s": 0.0})
        _exit(1)

    # -- the server -------------------------------------------------------------------------------------

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            if _getpid() != self._pid:
                return
            # a launcher that is stopped reads nothing, and is waited for; one that is gone ends us
            with self._watch.unwatched():
                self._channel.send(message, timeout_s=_PATIENCE_S)
        except ChannelClosedError:
            _exit(0)

    def _serve(self) -> tuple[Message, tuple[int, ...]]:
        """Answer requests; returns only in a rank, with what it is to be."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        idle_work = collapse_memory()
        wait_ms: float | None = _IDLE_MS
        while True:
            if not poller.poll(wait_ms):
                # nobody has asked for anything: make the next fork faster, and look again after each little step
                wait_ms = 0 if next(idle_work, _DONE) is None else None
                continue
            wait_ms = _IDLE_MS
            try:
                received = self._channel.receive()
            except ChannelClosedError:
                _exit(0)
            begun: list[Begun | OSError] = []
            for message, fds in received:
                if message["type"] == "check":
                    self._tell({"type": "checked", "changed": self._watch.looked.changed()})
                elif message["type"] == "spawn" and self._begin_rank(begun):
                    return message, fds
                close_fds(fds)
            # all were begun before the first is waited for: what is in between forks while we fork the next
            for each in begun:
                self._finish_rank(each)

    def _begin_rank(self, begun: list[Begun | OSError]) -> bool:
        """Begin to fork one; True in the new process."""
        try:
            fork = begin_fork()
        except OSError as error:
            fork = error  # type: ignore[assignment]
        if fork is not None:
            begun.append(fork)
            return False
        for other in begun:
            if isinstance(other, Begun):
                os.close(other.read_fd)
        return True

    def _finish_rank(self, begun: Begun | OSError) -> None:
        """Tell the launcher the number of a process that was begun, or why there is none."""
        try:
            if isinstance(begun, OSError):
                raise begun
            self._tell({"type": "forked", "pid": finish_fork(begun)})
        except OSError as error:
            self._tell({"type": "failed", "reason": str(error)})

    # -- the rank ---------------------------------------------------------------------------------------

    def _become(self, message: Message, fds: tuple[int, ...]) -> None:
        """Take on the rank's identity, as soon as the launcher is the parent of this process and says so."""
        self._channel.close()  # by its object: collected later, it would close a number that is another's by then
        os.setsid()
        go_fd, *streams = fds
        into_streams(self._script_fds, dict(zip(map(identity, self._captured), streams, strict=False)))
        if not os.read(go_fd, 1):
            _exit(1)  # the launcher has given this one up
        die_with_parent()
        # the launcher may have died before the kernel was asked
        if os.getppid() != self._launcher_pid:
            _exit(1)
        set_name(self._name)
        for name, value in message["env"].items():
            _environ[name] = value
        for stream in self._claimed:
            del stream.isatty
        _replay(self._captured, streams)
        separate(self._script_fds, self._given)
        self._watch.randomness.freshen()
        process: Any = sys.modules.get("multiprocessing.process")
        if process is not None:
            process.current_process().authkey = os.urandom(32)
        for thread in self._threads:
            if hasattr(thread, "_handle") and not thread._started.is_set():
                thread._handle = type(thread._handle)()  # from Python 3.13 on, a fork marks the old one as ended
        threading._dangling.update(self._threads)  # type: ignore[attr-defined]
        main_thread: Any = threading.main_thread()
        main_thread._set_native_id()
        note_user_code()
        self._is_rank = True
        if self._on_child is not None:
            signal.signal(signal.SIGCHLD, self._on_child)

    def _gate_fork_handlers(self) -> None:
        """A script's handlers of forks are for its own forks: it may hold their locks where it waits."""
        register = os.register_at_fork

        def gated(handler: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: handler() if self._is_rank or not self._has_stopped else None

        def register_at_fork(**handlers: Callable[[], Any]) -> None:
            register(**{when: gated(h) if callable(h) else h for when, h in handlers.items()})

        self._watch.replaced.put(os, "register_at_fork", register_at_fork)

    def _claim_terminals(self) -> None:
        """What is written is kept back, but the ranks' streams are terminals where the launcher's are."""
        isatty = os.isatty
        if not self._terminals:
            return
        self._watch.replaced.put(os, "isatty", lambda fd: fd in self._terminals or isatty(fd))
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            if fd in self._terminals:
                stream.isatty = lambda: True  # type: ignore[method-assign]
                self._claimed.append(stream)

    def _watch_input(self) -> None:
        """Nothing tells when ``sys.stdin`` is read, so another one has to; not where there is nothing to read."""
        facts = os.fstat(0)
        if sys.stdin is None or (stat.S_ISCHR(facts.st_mode) and facts.st_rdev == os.makedev(1, 3)):
            return
        raw = _Input(0, "rb", closefd=False)
        raw.name = "<stdin>"
        watched: Any = io.TextIOWrapper(
            io.BufferedReader(raw),
            encoding=sys.stdin.encoding,
            errors=sys.stdin.errors,
            newline="\n",
            line_buffering=bool(sys.stdin.line_buffering),
        )
        watched.mode = "r"
        _kept.append(sys.__stdin__)
        sys.stdin = sys.__stdin__ = watched  # type: ignore[misc]

    def _write_error(self) -> None:
        """What ends a rank, where torch looks for it: also without torch's ``@record`` around ``main``."""
        if self._is_rank and _getpid() == os.getsid(0) and isinstance(getattr(sys, "last_value", None), Exception):
            write_error_file(sys.last_type, sys.last_value, sys.last_traceback)  # type: ignore[arg-type]


class _Input(io.FileIO):
    def readinto(self, buffer: Any) -> int | None:
        stop("reads standard input")
        return super().readinto(buffer)

    def readall(self) -> bytes:
        stop("reads standard input")
        return super().readall()


_kept: list[Any] = []
"""What the process had before and can't do without, though nothing refers to it any more."""


def _replay(captured: tuple[int, int], streams: list[int]) -> None:
    """Say what the script has said before, to the rank's own streams."""
    out, err = captured
    for fd, target in ((out, streams[0]), (err, streams[1])):
        position, size = 0, os.fstat(fd).st_size
        if fd == err and os.path.sameopenfile(out, err):
            continue  # one stream: it was in the right order
        with contextlib.suppress(OSError):  # nobody reads it any more
            while position < size:
                position += os.write(target, os.pread(fd, 1 << 16, position))
