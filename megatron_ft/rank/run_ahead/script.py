"""A script that is run ahead up to its first act that ranks can't share, and then forked for each rank.

``startup/sitecustomize.py`` calls ``begin`` before the script's first line. The script then runs normally, until
``stop`` is called in the middle of an act: that call returns in each rank, never here. The launcher holds the other end
of a socket pair; its closing ends this process. Ranks are children of the launcher, made by forking twice: the launcher
is child subreaper, and adopts the orphans of the intermediate process.
"""

from __future__ import annotations

import atexit
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
from typing import Any

from megatron_ft.core.messages.fork_server import (
    TO_SERVER,
    CheckFiles,
    Failed,
    FilesChecked,
    Forked,
    FromServer,
    ModuleLeftOut,
    ScriptReady,
    Spawn,
    Unfit,
)
from megatron_ft.core.run_ahead import FORK_SERVER_NAME, RUN_AHEAD_VARIABLE, wants_watch
from megatron_ft.ipc.linux.process_setup import die_with_parent, set_name
from megatron_ft.ipc.net.resolver import ask_again_soon
from megatron_ft.ipc.wire import Channel, ChannelClosedError, close_fds
from megatron_ft.rank.base.user_code import note_user_code
from megatron_ft.rank.collectives import init_hook
from megatron_ft.rank.crash_reporter.error_file import write_error_file
from megatron_ft.rank.run_ahead.call_stack import place
from megatron_ft.rank.run_ahead.forking import collapse_memory, fork_orphans
from megatron_ft.rank.run_ahead.sharing import descriptors, identity, take_over, why_not_shared
from megatron_ft.rank.run_ahead.standard_input import WatchedInput
from megatron_ft.rank.run_ahead.watching import Watch

_IDLE_MS: float = 1000.0
_PATIENCE_S = 3600.0
_DONE = object()
# the originals, before they are replaced
_exit, _getpid, _environ = os._exit, os.getpid, os.environ

_ahead: RunAhead | None = None


def begin(known: set[str]) -> None:
    """Watch this process from now on. ``known``: modules that a script finds imported anyway."""
    global _ahead
    orders = json.loads(os.environ.pop(RUN_AHEAD_VARIABLE))
    if orders["python_path"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = orders["python_path"]
    _ahead = RunAhead(orders)
    _ahead.begin(orders["terminals"])
    _forget_hidden(known, orders["first_in_path"])
    _ahead.preload(orders["preload"], orders["first_in_path"])


def stop(what: str) -> None:
    """Wait here if the script is run ahead; ``what`` is its next act. Returns in a rank, or if it isn't run ahead."""
    if _ahead is not None:
        _ahead.stop(what)


def _forget_hidden(known: set[str], directory: str) -> None:
    """Forget modules of Python's that the script's own modules of the same name (``queue.py``) would hide."""
    for name in sys.modules.keys() - known:
        top = name.partition(".")[0]
        spec = None if top == "megatron_ft" else PathFinder.find_spec(top, [directory])
        if spec is not None and spec.origin is not None:
            del sys.modules[name]


class RunAhead:
    """A process that runs its script ahead, then forks ranks, and continues in each of them."""

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
        self._asks_for: str | None = None
        self._blocked: set[int] = set()

    def begin(self, terminals: list[int]) -> None:
        """Start watching. ``terminals``: descriptors among 1 and 2 that are terminals in the ranks."""
        die_with_parent()
        if os.getppid() != self._launcher_pid:
            _exit(0)
        # for a signal sent to a rank before the process has become one
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        ask_again_soon()
        atexit.register(gc.unfreeze)  # else libraries find live objects at the end, and report leaks
        threading._register_atexit(self._write_error)  # type: ignore[attr-defined]
        self._gate_fork_handlers()
        self._watch_input()
        self._pass_as_terminals(terminals)
        self._watch.begin()

    def preload(self, names: list[str], directory: str) -> None:
        """Import the modules the user asked for, before the script."""
        sys.path.insert(0, directory)
        for name in names:
            self._asks_for = name
            try:
                importlib.import_module(name)
            except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit included
                self._tell(ModuleLeftOut(name, f"{type(error).__name__}: {error}"))
        self._asks_for = None
        sys.path.remove(directory)

    def stop(self, what: str) -> None:
        """Wait here for good, and fork ranks; returns only in those. Does nothing in the script's own forks."""
        if self._has_stopped or _getpid() != self._pid:
            return
        if gc.isenabled():
            gc.collect(1)  # garbage would never be collected after this; its finalizers must be watched
        if self._is_rank:
            return  # a finalizer was the first act that can't be shared
        self._has_stopped = True
        try:
            self._wait(what)
        except BaseException as error:  # noqa: BLE001 - whatever it is: the script would catch it, and go on unwatched
            sys.__excepthook__(type(error), error, error.__traceback__)
            self._tell(Unfit(f"{type(error).__name__}: {error}"))
            _exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)  # pending signals are delivered now

    def _wait(self, what: str) -> None:
        """Stop watching, tell the launcher, and serve. The code after ``_serve`` runs in a rank."""
        took_s = time.monotonic() - self._began_s
        where = place() or (f"--ft-preload {self._asks_for}" if self._asks_for else "")
        self._watch.end()
        self._watch.files.note_unseen()
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # after a fork Python marks all other threads as ended, even those never started
        threads = [*threading._dangling]  # type: ignore[attr-defined]
        threading._dangling.clear()  # type: ignore[attr-defined]
        on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel may reap what we wait for
        reason = self._watch.randomness.why_spoiled() or why_not_shared(self._own_fds, self._given)
        if reason is not None:
            self._tell(Unfit(reason, where, what))
            _exit(0)
        script_fds = descriptors(self._own_fds)
        name = set_name(FORK_SERVER_NAME.encode())
        gc.freeze()  # else a collection in a rank would copy every page it visits
        self._tell(ScriptReady(where, what, took_s))
        variables, fds = self._serve()
        self._wait_for_launcher(fds[0])
        set_name(name)
        for variable, value in variables.items():
            _environ[variable] = value
        if not wants_watch(_environ):
            init_hook.end()
        take_over(script_fds, self._given, self._captured, fds[1:])
        self._watch.randomness.freshen()
        process: Any = sys.modules.get("multiprocessing.process")
        if process is not None:
            process.current_process().authkey = os.urandom(32)
        for thread in threads:
            if hasattr(thread, "_handle") and not thread._started.is_set():
                thread._handle = type(thread._handle)()  # from Python 3.13 on, a fork marks the old one as ended
        threading._dangling.update(threads)  # type: ignore[attr-defined]
        main_thread: Any = threading.main_thread()
        main_thread._set_native_id()
        note_user_code()
        self._is_rank = True
        if on_child is not None:
            signal.signal(signal.SIGCHLD, on_child)

    # -- the server -------------------------------------------------------------------------------------

    def _tell(self, message: FromServer) -> None:
        try:
            if _getpid() != self._pid:
                return
            # a stopped launcher reads nothing, and is waited for; its death ends this process
            with self._watch.unwatched():
                self._channel.send(message, timeout_s=_PATIENCE_S)
        except ChannelClosedError:
            _exit(0)

    def _serve(self) -> tuple[Mapping[str, str], tuple[int, ...]]:
        """Answer requests. Returns only in a rank, with its variables and descriptors."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        idle_work = collapse_memory()
        wait_ms: float | None = _IDLE_MS
        while True:
            if not poller.poll(wait_ms):
                # no order has come: make the next fork faster, checking for orders after each small step
                wait_ms = 0 if next(idle_work, _DONE) is None else None
                continue
            wait_ms = _IDLE_MS
            try:
                received = [(TO_SERVER.parse(message), fds) for message, fds in self._channel.receive()]
            except ChannelClosedError:
                _exit(0)
            if any(isinstance(request, CheckFiles) for request, _ in received):
                self._tell(FilesChecked(self._watch.files.changed()))
            spawns = [(request.env, fds) for request, fds in received if isinstance(request, Spawn)]
            answers: list[FromServer] = []
            try:
                made = fork_orphans(len(spawns)) if spawns else []
                if isinstance(made, int):
                    return spawns[made]
                answers = [Forked(pid) for pid in made]
            except OSError as error:
                answers = [Failed(str(error))] * len(spawns)
            for answer, (_, fds) in zip(answers, spawns, strict=True):
                self._tell(answer)
                close_fds(fds)

    # -- the rank ---------------------------------------------------------------------------------------

    def _wait_for_launcher(self, go_fd: int) -> None:
        """Wait until the launcher has adopted this process and orders it to go on."""
        # by its object: collected later, it would close a number that belongs to another file by then
        self._channel.close()
        os.setsid()
        if not os.read(go_fd, 1):
            _exit(1)  # the launcher has given up on this process
        die_with_parent()
        # the launcher may have died before die_with_parent took effect
        if os.getppid() != self._launcher_pid:
            _exit(1)

    def _gate_fork_handlers(self) -> None:
        """Limit the script's fork handlers to the script's own forks: it may hold their locks where it waits."""
        register = os.register_at_fork

        def gated(handler: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: handler() if self._is_rank or not self._has_stopped else None

        def register_at_fork(**handlers: Callable[[], Any]) -> None:
            register(**{when: gated(h) if callable(h) else h for when, h in handlers.items()})

        self._watch.replaced.put(os, "register_at_fork", register_at_fork)

    def _pass_as_terminals(self, terminals: list[int]) -> None:
        """Let ``isatty`` answer as in the ranks, whose streams are terminals; here, output goes to files."""
        isatty, put = os.isatty, self._watch.replaced.put
        if terminals:
            put(os, "isatty", lambda fd: fd in terminals or isatty(fd))
        for fd in terminals:
            put((sys.stdout, sys.stderr)[fd - 1], "isatty", lambda: True)

    def _watch_input(self) -> None:
        """Replace ``sys.stdin``, whose reads raise no audit event, by a stream that stops first; not if it is
        /dev/null."""
        facts = os.fstat(0)
        if sys.stdin is None or (stat.S_ISCHR(facts.st_mode) and facts.st_rdev == os.makedev(1, 3)):
            return
        raw = WatchedInput(lambda: self.stop("reads standard input"))
        old = sys.stdin
        watched: Any = io.TextIOWrapper(
            io.BufferedReader(raw), old.encoding, old.errors, "\n", bool(old.line_buffering)
        )
        watched.mode = "r"
        _kept.append(sys.__stdin__)
        sys.stdin = sys.__stdin__ = watched  # type: ignore[misc]

    def _write_error(self) -> None:
        """Write the exception that ends a rank, also without torch's ``@record``."""
        if self._is_rank and _getpid() == os.getsid(0) and isinstance(getattr(sys, "last_value", None), Exception):
            write_error_file(sys.last_type, sys.last_value, sys.last_traceback)  # type: ignore[arg-type]


_kept: list[Any] = []
"""The first ``sys.stdin``; kept alive though nothing else refers to it."""
