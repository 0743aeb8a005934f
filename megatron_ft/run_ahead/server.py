"""The fork server: imports what the script's leading statements import, then becomes each rank by a fork.

``startup/sitecustomize.py`` calls ``begin``, which returns only in ranks. The launcher holds the other end of a socket
pair; its closing ends this process.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import mmap
import os
import select
import signal
import site
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Any

from megatron_ft.core.messages.fork_server_messages import (
    TO_SERVER,
    CheckFiles,
    Failed,
    FilesChecked,
    Forked,
    FromServer,
    ImportActs,
    ImportsReady,
    ModuleLeftOut,
    Spawn,
    Unfit,
)
from megatron_ft.core.rank_variables import is_set_for_ranks, wants_watch
from megatron_ft.ipc.linux.process_setup import die_with_parent, set_name
from megatron_ft.ipc.net.resolver import ask_again_soon
from megatron_ft.ipc.wire import Channel, ChannelClosedError, close_fds
from megatron_ft.rank.base import loaded_modules
from megatron_ft.rank.base.user_code import note_user_code
from megatron_ft.rank.collectives import init_hook
from megatron_ft.rank.crash_reporter.error_file import write_error_file
from megatron_ft.run_ahead.acts import Watch, descriptors, is_installed, user_files
from megatron_ft.run_ahead.forking import collapse_memory, fork_orphans
from megatron_ft.run_ahead.leading import Changes, EndError, LeadingStatements, RankError
from megatron_ft.run_ahead.orders import FORK_SERVER_NAME, RUN_AHEAD_VARIABLE

_IDLE_MS: float = 500.0
_PATIENCE_S = 3600.0
_DONE = object()
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that lets torch count devices without the CUDA driver, which can't be used in a fork any more."""
_exit = os._exit


def begin(known: set[str]) -> None:
    """Serve; return only in ranks. ``known``: modules that a script finds imported anyway."""
    orders = json.loads(os.environ.pop(RUN_AHEAD_VARIABLE))
    if orders["python_path"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = orders["python_path"]
    server = ForkServer(orders)
    try:
        server.begin(known)
        server.become_rank(*server.serve())
    except BaseException as error:  # noqa: BLE001 - whatever it is: Python would go on, and run the script as a rank
        server.fail(error)
    if signal.SIGINT in signal.sigpending() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception here would look like an error of Python
    signal.pthread_sigmask(signal.SIG_SETMASK, server.signals)  # pending signals are delivered now


class ForkServer:
    """A process that imports, and forks ranks."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._began_s = time.monotonic()
        self._pid = os.getpid()
        self._launcher_pid: int = orders["launcher"]
        self._preload: list[str] = orders["preload"]
        self._left_out: list[str] = orders["left_out"]
        self._ends_first: bool = orders["ends_first"]
        self._command: list[str] = orders["command"][2:]
        self._script = ""
        """File of the script; empty if it can't be found."""
        self._channel = Channel(socket.socket(fileno=orders["fd"]))
        self._captured = os.dup(1), os.dup(2)
        self.signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._changes = Changes()
        self._loaded = loaded_modules.share(mmap.mmap(-1, loaded_modules.SIZE))
        self._watch = Watch(self._act)
        self._current = ("", 0)
        """Text and line of the import that is being done."""
        self._is_vouched = self._is_evaluating = False
        self._own_fds = set(descriptors(set()))

    def begin(self, known: set[str]) -> None:
        """Import what ranks share, and tell the launcher."""
        die_with_parent()
        if os.getppid() != self._launcher_pid:
            _exit(0)
        ask_again_soon()
        atexit.register(gc.unfreeze)  # else libraries find live objects at the end, and report leaks
        directory = self._directory()
        _forget_hidden(known, directory)
        if not getattr(sys.flags, "safe_path", False):
            self._changes.apply(lambda: sys.path.insert(0, directory))
        asks_itself = _ASK_NVML in os.environ
        if not asks_itself:
            self._changes.apply(lambda: os.environ.__setitem__(_ASK_NVML, "1"))
        argv, main = list(sys.argv), sys.modules["__main__"]
        with self._watch:
            line = self._import_all()
        sys.argv[:] = argv
        vars(main).pop("__file__", None)
        for path in {self._script, *user_files()}:
            self._watch.note(path)
        self._name = set_name(FORK_SERVER_NAME.encode())
        # after a fork Python marks all other threads as ended, even those never started
        self._threads = [*threading._dangling]  # type: ignore[attr-defined]
        threading._dangling.clear()  # type: ignore[attr-defined]
        gc.freeze()  # else a collection in a rank would copy every page it visits
        variables = {name: value for name, value in os.environ.items() if asks_itself or name != _ASK_NVML}
        self._environment = {name: value for name, value in variables.items() if not is_set_for_ranks(name)}
        where = f"{os.path.basename(self._script)}:{line}" if line else ""
        self._tell(ImportsReady(where, time.monotonic() - self._began_s))

    def fail(self, error: BaseException) -> None:
        sys.__excepthook__(type(error), error, error.__traceback__)
        self._tell(Unfit(f"{type(error).__name__}: {error}"))
        _exit(1)

    # -- imports ----------------------------------------------------------------------------------------

    def _directory(self) -> str:
        """Return the first entry of ``sys.path`` in a rank."""
        script = self._command[0]
        if script == "-m":
            return os.getcwd()
        return script if os.path.isdir(script) else os.path.dirname(os.path.realpath(script))

    def _import_all(self) -> int:
        """Import in the order of a fresh interpreter. Return the line of the script at which the shared part ends."""
        for name in ["sitecustomize", *(["usercustomize"] if site.ENABLE_USER_SITE else [])]:
            self._customize(name)
        for name in self._preload:
            try:
                self._import(f"import {name}", 0, lambda name=name: importlib.import_module(name))  # type: ignore[misc]
            except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit included
                self._tell(ModuleLeftOut(name, f"{type(error).__name__}: {error}"))
        try:
            self._script, package = self._find_script()
            with open(self._script, "rb") as file:
                tree = ast.parse(file.read())
        except (OSError, ImportError, SyntaxError, ValueError, AttributeError):
            return 0  # its ranks report it
        # some modules ask what is run
        sys.modules["__main__"].__file__ = sys.argv[0] = self._script
        leading = LeadingStatements(self._script, package, self._changes, self._import)
        self._is_vouched = leading.find_vouched(tree)
        self._is_evaluating = True
        line = leading.run(tree)
        self._is_evaluating = False
        return line

    def _customize(self, name: str) -> None:
        """Import the user's module of that name, which Python imports before a script."""
        ours = sys.modules.pop(name, None)
        try:
            self._import(f"import {name}", 0, lambda: importlib.import_module(name))
        except Exception as error:  # noqa: BLE001 - whatever it is, Python reports it in each rank
            if not (isinstance(error, ImportError) and error.name == name):
                self._acted(f"raises {type(error).__name__}", name)
        if ours is not None:
            sys.modules.setdefault(name, ours)

    def _find_script(self) -> tuple[str, str | None]:
        """Return the file that the command runs, and its package under ``-m``, which is imported, as Python does."""
        script = self._command[0]
        if script != "-m":
            return (os.path.join(script, "__main__.py") if os.path.isdir(script) else script), None
        name = self._command[1]
        if "." in name:
            package = name.rpartition(".")[0]
            self._import(f"import {package}", 0, lambda: importlib.import_module(package))
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            self._import(f"import {name}", 0, lambda: importlib.import_module(name))
            spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None or spec.origin is None:
            raise ImportError(name)
        return spec.origin, spec.parent

    def _import(self, text: str, line: int, act: Callable[[], object]) -> None:
        """Do one import, unless it was seen to act."""
        if text in self._left_out:
            if self._ends_first and line:
                raise EndError
            return
        self._current, before = (text, line), len(sys.modules)
        was_evaluating, self._is_evaluating = self._is_evaluating, False
        try:
            act()
        finally:
            self._is_evaluating = was_evaluating
            if len(sys.modules) != before:
                left = self._watch.remains(self._own_fds)
                if left is not None and (not self._is_vouched or "CUDA" in left):
                    self._acted(left, text.split()[1].partition(".")[0])

    def _act(self, what: str, module: str) -> None:
        """Hear from the watch what is about to be done."""
        if self._is_evaluating:
            raise RankError
        if not self._is_vouched and os.getpid() == self._pid:
            self._acted(what, module)

    def _acted(self, what: str, module: str) -> None:
        """End, before the act where that is possible: the launcher starts another server without this import."""
        self._watch.end()
        text, line = self._current
        where = f"{os.path.basename(self._script)}:{line}" if line else ""
        self._tell(ImportActs(text, where, what, module))
        _exit(0)

    def _import_loaded(self) -> None:
        """Import modules that ranks have loaded since their fork, if they are of packages that are shared already."""
        for name in self._loaded.take():
            top = sys.modules.get(name.partition(".")[0])
            file = getattr(top, "__file__", None)
            if name in sys.modules or not isinstance(file, str) or not is_installed(file):
                continue
            with self._watch, contextlib.suppress(Exception):  # a rank meets whatever it raises itself
                self._import(f"import {name}", 0, lambda name=name: importlib.import_module(name))  # type: ignore[misc]
            gc.freeze()

    # -- serving ------------------------------------------------------------------------------------------

    def _tell(self, message: FromServer) -> None:
        try:
            # a stopped launcher reads nothing, and is waited for; its death ends this process
            self._channel.send(message, timeout_s=_PATIENCE_S)
        except ChannelClosedError:
            _exit(0)

    def serve(self) -> tuple[Mapping[str, str], tuple[int, ...]]:
        """Answer requests. Return only in a rank, with its variables and descriptors."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        idle_work = collapse_memory()
        is_idle = False
        while True:
            if not poller.poll(0 if is_idle else _IDLE_MS):
                # no order has come: make the next fork faster, checking for orders after each small step
                is_idle = next(idle_work, _DONE) is None
                if not is_idle:
                    self._import_loaded()
                continue
            is_idle = False
            try:
                received = [(TO_SERVER.parse(message), fds) for message, fds in self._channel.receive()]
            except ChannelClosedError:
                _exit(0)
            if any(isinstance(request, CheckFiles) for request, _ in received):
                self._tell(FilesChecked(self._watch.changed_file()))
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

    # -- the rank -----------------------------------------------------------------------------------------

    def become_rank(self, variables: Mapping[str, str], fds: tuple[int, ...]) -> None:
        """Wait until the launcher has adopted this process and orders it to go on; then leave nothing of the server."""
        # by its object: collected later, it would close a number that belongs to another file by then
        self._channel.close()
        os.setsid()
        if not os.read(fds[0], 1):
            _exit(1)  # the launcher has given up on this process
        die_with_parent()
        # the launcher may have died before die_with_parent took effect
        if os.getppid() != self._launcher_pid:
            _exit(1)
        set_name(self._name)
        self._changes.undo()
        os.environ.update(variables)
        self._take_streams(fds)
        self._loaded.begin(self._environment if variables.get("LOCAL_RANK") == "0" else None)
        if not wants_watch(os.environ):
            init_hook.end()
        self._watch.seed_anew()
        process: Any = sys.modules.get("multiprocessing.process")
        if process is not None:
            process.current_process().authkey = os.urandom(32)
        for thread in self._threads:
            if hasattr(thread, "_handle") and not thread._started.is_set():
                thread._handle = type(thread._handle)()  # from Python 3.13 on, a fork marks the old one as ended
        threading._dangling.update(self._threads)  # type: ignore[attr-defined]
        main_thread: Any = threading.main_thread()
        main_thread._set_native_id()
        threading._register_atexit(_write_error)  # type: ignore[attr-defined]
        importlib.invalidate_caches()
        note_user_code()

    def _take_streams(self, fds: tuple[int, ...]) -> None:
        """Write what imports have printed to the rank's own streams, and put these in the place of the server's."""
        for file, stream, number in zip(self._captured, fds[1:], (1, 2), strict=True):
            position, size = 0, os.fstat(file).st_size
            with contextlib.suppress(OSError):  # its reader has gone
                while position < size:
                    position += os.write(stream, os.pread(file, 1 << 16, position))
            os.dup2(stream, number)
        close_fds([fd for fd in {*self._captured, *fds} if fd > 2])


def _forget_hidden(known: set[str], directory: str) -> None:
    """Forget modules of Python's that the script's own modules of the same name (``queue.py``) would hide."""
    for name in sys.modules.keys() - known:
        top = name.partition(".")[0]
        spec = None if top == "megatron_ft" else PathFinder.find_spec(top, [directory])
        if spec is not None and spec.origin is not None:
            del sys.modules[name]


def _write_error() -> None:
    """Write the exception that ends a rank, also without torch's ``@record``."""
    if os.getpid() == os.getsid(0) and isinstance(getattr(sys, "last_value", None), Exception):
        write_error_file(sys.last_type, sys.last_value, sys.last_traceback)  # type: ignore[arg-type]
