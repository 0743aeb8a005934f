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
from multiprocessing import process
from typing import Any

from megatron_ft.link.base.rank_variables import wants_watch, without_ranks
from megatron_ft.link.linux.process_setup import die_with_parent, set_name
from megatron_ft.link.messages import fork_server_messages as messages
from megatron_ft.link.resolver import ask_again_soon
from megatron_ft.link.wire import Channel, ChannelClosedError, close_fds
from megatron_ft.rank.base import loaded_modules, user_code
from megatron_ft.rank.base.loaded_modules import LoadedModules
from megatron_ft.rank.collectives import init_hook
from megatron_ft.rank.crash_reporter.error_file import write_error_file
from megatron_ft.run_ahead.acts import CUDA, Watch, is_installed
from megatron_ft.run_ahead.leading import Changes, EndError, LeadingStatements, RankError

_MOST_ACTS = 5
"""Number of imports that act after which the shared part ends at the first one."""
_IDLE_MS: float = 500.0
_exit, _fork = os._exit, os.fork  # a module may replace them


def begin(known: set[str]) -> None:
    """Serve; return only in ranks. ``known``: modules that a script finds imported anyway."""
    orders = json.loads(os.environ.pop(messages.RUN_AHEAD_VARIABLE))
    del os.environ["PYTHONPATH"]
    os.environ.update(orders["environment"])
    server = ForkServer(orders)
    try:
        server.begin(known)
        server.become_rank(*server.serve())
    except BaseException as error:  # noqa: BLE001 - whatever it is: Python would go on, and run the script as a rank
        sys.__excepthook__(type(error), error, error.__traceback__)
        server.tell(messages.Failed(f"{type(error).__name__}: {error}"))
        _exit(1)
    if signal.SIGINT in signal.sigpending() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an exception here would look like an error of Python
    signal.pthread_sigmask(signal.SIG_SETMASK, server.signals)  # pending signals are delivered now


class ForkServer:
    """A process that imports, and forks ranks."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._began_s = time.monotonic()
        self._orders = orders
        self._command = sys.orig_argv[2:]
        self._script = ""
        """File of the script; empty if it can't be found."""
        self._channel = Channel(socket.socket(fileno=orders["fd"]))
        self.signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._changes = Changes()
        self._loaded = loaded_modules.current = LoadedModules(mmap.mmap(-1, loaded_modules.SIZE))
        self._awaited: list[str] = []
        """Modules that ranks have loaded, to be imported while nothing else is to be done."""
        self._current: Any = None
        """Text and line of the import that is being done; None while a statement is evaluated."""
        self._is_vouched = False
        self._watch = Watch(self._act)

    def begin(self, known: set[str]) -> None:
        """Import what ranks share, and tell the launcher."""
        die_with_parent()
        if os.getppid() != self._orders["launcher"]:
            _exit(0)
        ask_again_soon()
        atexit.register(gc.unfreeze)  # else libraries find live objects at the end, and report leaks
        directory = script = self._command[0]  # from where a rank imports first
        if script == "-m" or not os.path.isdir(script):
            directory = os.getcwd() if script == "-m" else os.path.dirname(os.path.realpath(script))
        _forget_hidden(known, directory)
        if not getattr(sys.flags, "safe_path", False):
            self._changes.apply(lambda: sys.path.insert(0, directory))
        self._changes.apply(lambda: os.environ.setdefault(loaded_modules.ASK_NVML, "1"))
        argument, main = sys.argv[0], sys.modules["__main__"]
        with self._watch:
            line = self._import_all()
        sys.argv[0] = argument
        vars(main).pop("__file__", None)
        self._watch.note(self._script)
        self._watch.note_modules()
        self._name = set_name(messages.FORK_SERVER_NAME.encode())
        # after a fork Python marks all other threads as ended, even those never started
        self._threads = [*threading._dangling]  # type: ignore[attr-defined]
        threading._dangling.clear()  # type: ignore[attr-defined]
        gc.freeze()  # else a collection in a rank would copy every page it visits
        self._environment = without_ranks(os.environ)
        self.tell(messages.ImportsReady(self._where(line), time.monotonic() - self._began_s))

    # -- imports ----------------------------------------------------------------------------------------

    def _import_all(self) -> int:
        """Import in the order of a fresh interpreter. Return the line of the script at which the shared part ends."""
        for name in ["sitecustomize", *(["usercustomize"] if site.ENABLE_USER_SITE else [])]:
            ours = sys.modules.pop(name, None)  # the user's module has that name, too
            with contextlib.suppress(Exception):  # there is none; or it raises: then Python reports it in each rank
                self._import_module(name)
            if ours is not None:
                sys.modules.setdefault(name, ours)
        for name in self._orders["preload"]:
            try:
                self._import_module(name)
            except BaseException as error:  # noqa: BLE001 - a module may raise anything, SystemExit included
                sys.stderr.write(f"FT: WARNING: --ft-preload {name}: {type(error).__name__}: {error}\n")
        try:
            self._script, package = self._find_script()
            with open(self._script, "rb") as file:
                tree = ast.parse(file.read())
        except (OSError, ImportError, SyntaxError, ValueError, AttributeError, LookupError, TypeError):
            return 0  # its ranks report it
        # some modules ask what is run
        sys.modules["__main__"].__file__ = sys.argv[0] = self._script
        leading = LeadingStatements(tree, self._script, package, self._changes, self._import)
        self._is_vouched = leading.vouched > 0
        return leading.run()

    def _find_script(self) -> tuple[str, str | None]:
        """Return the file that the command runs, and its package under ``-m``, which is imported, as Python does."""
        script = self._command[0]
        if script != "-m":
            return (os.path.join(script, "__main__.py") if os.path.isdir(script) else script), None
        name = self._command[1]
        found: list[Any] = []

        def find() -> None:  # imports its packages
            spec = importlib.util.find_spec(name)
            is_package = spec is not None and spec.submodule_search_locations is not None
            found.append(importlib.util.find_spec(f"{name}.__main__") if is_package else spec)

        self._import(f"import {name}", 0, find)
        return found[0].origin, found[0].parent

    def _import_module(self, name: str) -> None:
        self._import(f"import {name}", 0, lambda: importlib.import_module(name))

    def _import(self, text: str, line: int, act: Callable[[], object]) -> None:
        """Do one import, unless it was seen to act."""
        if text in self._orders["left_out"]:
            if line and len(self._orders["left_out"]) >= _MOST_ACTS:
                raise EndError
            return
        self._current, before = (text, line), len(sys.modules)
        printed = [os.fstat(fd).st_size for fd in (1, 2)]
        try:
            act()
        except BaseException as error:  # a module may raise anything, SystemExit included
            # each rank does the same once more, which would be seen; but not if only a part of it isn't installed
            if line and not (isinstance(error, ImportError) and printed == [os.fstat(fd).st_size for fd in (1, 2)]):
                self._acted(f"raises {type(error).__name__}", text.split()[1])
            raise
        finally:
            left = None if len(sys.modules) == before else self._watch.remains()
            if left is not None and (left == CUDA or not self._is_vouched):
                self._acted(left, text.split()[1])
            self._current = None

    def _act(self, what: str, module: str) -> None:
        """Hear from the watch what is about to be done."""
        if self._current is None:
            raise RankError
        if not self._is_vouched:
            self._acted(what, module)

    def _acted(self, what: str, module: str) -> None:
        """End, before the act where that is possible: the launcher starts another server without this import."""
        text, line = self._current
        self._watch.end()
        self.tell(messages.ImportActs(text, self._where(line), what, module))
        _exit(0)

    def _where(self, line: int) -> str:
        return f"{os.path.basename(self._script)}:{line}" if line else ""

    def _import_loaded(self, poller: select.poll) -> None:
        """Import what ranks have loaded since their fork, of packages shared already, until an order comes."""
        self._awaited += self._loaded.take()
        while self._awaited and not poller.poll(0):
            name = self._awaited.pop(0)
            file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
            if name not in sys.modules and isinstance(file, str) and is_installed(file):
                with self._watch, contextlib.suppress(Exception):  # a rank meets whatever it raises itself
                    self._import_module(name)
                gc.freeze()

    # -- serving ------------------------------------------------------------------------------------------

    def tell(self, message: messages.FromServer) -> None:
        try:
            # a stopped launcher reads nothing, and is waited for; its death ends this process
            self._channel.send(message, timeout_s=3600.0)
        except ChannelClosedError:
            _exit(0)

    def serve(self) -> tuple[Mapping[str, str], tuple[int, ...]]:
        """Answer requests. Return only in a rank, with its variables and descriptors."""
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        spawns: list[tuple[messages.Spawn, tuple[int, ...]]] = []
        while True:
            if not poller.poll(_IDLE_MS):
                self._import_loaded(poller)
                continue
            try:
                spawns += [(messages.TO_SERVER.parse(message), fds) for message, fds in self._channel.receive()]
            except ChannelClosedError:
                _exit(0)
            if not spawns or spawns[-1][0].more:
                continue
            answer = self._fork(len(spawns))
            if isinstance(answer, int):
                request, fds = spawns[answer]
                return request.env, fds
            self.tell(answer)
            for _, fds in spawns:
                close_fds(fds)
            spawns.clear()

    def _fork(self, count: int) -> messages.FromServer | int:
        """Fork ranks, for the launcher, a child subreaper, to adopt. Return the index in each, and the answer here.

        An intermediate process forks them, and ends. If not all can be made, those that were wait for the order to go
        on, which doesn't come.

        Raises:
            OSError: not all can be made.
        """
        if (changed := self._watch.changed_file()) is not None:
            return messages.FilesChanged(changed)
        self._loaded.prepare_fork()
        read_fd, write_fd = os.pipe()
        with open(read_fd, "rb") as numbers, open(write_fd, "wb", buffering=0) as telling:
            between = _fork()
            if between == 0:
                # no more forks possible; or the server has ended, and nothing reads this
                with contextlib.suppress(OSError):
                    for index in range(count):
                        pid = _fork()
                        if pid == 0:
                            return index
                        telling.write(b"%d " % pid)
                _exit(0)
            telling.close()
            pids = tuple(map(int, numbers.read().split()))
        with contextlib.suppress(ChildProcessError):  # a module has told the kernel to reap children
            os.waitpid(between, 0)
        if len(pids) < count:
            raise OSError(f"no more than {len(pids)} processes can be made")
        return messages.Forked(pids)

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
        if os.getppid() != self._orders["launcher"]:
            _exit(1)
        set_name(self._name)
        self._changes.undo()
        os.environ.update(variables)
        for number, stream in enumerate(fds[1:], 1):  # what imports have printed comes first
            with contextlib.suppress(OSError):  # its reader has gone
                os.write(stream, os.pread(number, os.fstat(number).st_size, 0))
            os.dup2(stream, number)
        close_fds([fd for fd in fds if fd > 2])
        self._loaded.begin(self._environment if variables.get("LOCAL_RANK") == "0" else None)
        if not wants_watch(os.environ):
            init_hook.end()
        self._watch.seed_anew()
        process.current_process().authkey = os.urandom(32)
        for thread in self._threads:
            if hasattr(thread, "_handle") and not thread._started.is_set():
                thread._handle = type(thread._handle)()  # from Python 3.13 on, a fork marks the old one as ended
        threading._dangling.update(self._threads)  # type: ignore[attr-defined]
        main_thread: Any = threading.main_thread()
        main_thread._set_native_id()
        threading._register_atexit(_write_error)  # type: ignore[attr-defined]
        user_code.began_ns = time.monotonic_ns()


def _forget_hidden(known: set[str], directory: str) -> None:
    """Forget modules of Python's that the script's own modules of the same name (``queue.py``) would hide."""
    for name in sys.modules.keys() - known:
        top = name.partition(".")[0]
        spec = None if top == "megatron_ft" else PathFinder.find_spec(top, [directory])
        if spec is not None and spec.origin is not None:
            del sys.modules[name]


def _write_error() -> None:
    """Write the exception that ends a rank, also without torch's ``@record``."""
    if os.getpid() == os.getsid(0):
        write_error_file(getattr(sys, "last_value", None))
