"""Sees a script's first act that ranks can't share, before it happens. For a script that is run ahead."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ft.core.preload import tells_ranks_apart
from megatron_ft.rank.acting import in_import, is_librarys, is_own, users_frame
from megatron_ft.rank.cuda_questions import answer_without_cuda
from megatron_ft.rank.looked_at import LookedAt
from megatron_ft.rank.randomness import Randomness
from megatron_ft.rank.replacing import Replacements
from megatron_ft.rank.watched_environ import watch_environ

__all__ = ["Watch"]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STANDARD_INPUT = (0, "/dev/stdin", "/proc/self/fd/0", "/dev/fd/0", "/dev/tty")
_CHANGES_FILES = (
    *("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("os.chown", "os.utime", "os.setxattr", "os.removexattr", "tempfile.mkstemp", "tempfile.mkdtemp"),
    *("shutil.rmtree", "shutil.move", "shutil.copyfile", "sqlite3.connect"),
)
_STARTS_PROGRAM = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.spawn")
_NEVER_SHARED = {
    "os.fork": "forks",
    "os.forkpty": "forks",
    "os.exec": "becomes another program",
    "_thread.start_new_thread": "starts a thread",
    "_thread.start_joinable_thread": "starts a thread",
    "socket.connect": "connects",
    "socket.sendto": "sends",
    "socket.sendmsg": "sends",
    "fcntl.flock": "locks a file",
    "fcntl.lockf": "locks a file",
    "builtins.input": "reads standard input",
    "os.kill": "sends a signal",
    "os.killpg": "sends a signal",
    "signal.pthread_kill": "sends a signal",
    "syslog.syslog": "writes to the system's log",
    "syslog.openlog": "writes to the system's log",
}
_STOPS_WHEN_IMPORTED = (
    ("multiprocessing.util", "spawnv_passfds", "starts a process"),
    ("multiprocessing.synchronize", "SemLock.__init__", "makes a lock for processes"),
    ("asyncio.base_events", "BaseEventLoop.__init__", "makes an event loop"),
    ("torch.distributed.distributed_c10d", "init_process_group", "makes a process group"),
    ("torch.distributed", "init_process_group", "makes a process group"),
    ("torch.serialization", "save", "saves a file"),
    ("torch", "save", "saves a file"),
    ("uuid", "uuid1", "makes a number that nobody else has"),
)
_MOST_FILES = 20_000
_LEAVES_NO_FILE = "_get_default_tempdir"
"""Of ``tempfile``: it tries whether a directory can be written, and leaves nothing."""

_handlers: dict[str, Callable[[Any], None]] = {}
"""By audit event. An audit hook can't be taken back: in ranks it finds this empty."""


def _audit(event: str, arguments: Any) -> None:
    handler = _handlers.get(event)
    if handler is not None:
        handler(arguments)


class Watch:
    """From ``begin`` to ``end`` nothing outside of this process is changed: ``stop`` is called before it would be."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        """``stop`` is called with what the script is about to do; it returns in a rank only, where it is done."""
        self._is_quiet = False
        self._stop: Callable[[str], None] = lambda what: None if self._is_quiet else stop(what)
        self.looked = LookedAt()
        self.randomness = Randomness(self._stop, self._if_users)
        self._replaced = Replacements()
        self._end_environ: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Once in a process."""
        self._end_environ = watch_environ(
            lambda name: self._stop(f"reads {name}"), self._walks, lambda: self._stop("copies os.environ")
        )
        self._replace_functions()
        for name, hook in self.randomness.hooks().items():
            self._replaced.when_imported(name, hook)
        self._replaced.when_imported("torch", self._answer_without_cuda)
        for owner, function, what in _STOPS_WHEN_IMPORTED:
            self._replaced.when_imported(owner, self._stopping(function, what))
        for event, what in _NEVER_SHARED.items():
            _handlers[event] = _calling(self._stop, what)
        for event in _CHANGES_FILES:
            _handlers[event] = _calling(self._if_changed_by_user, f"changes files ({event})")
        for event in _STARTS_PROGRAM:
            _handlers[event] = self._starts_program
        for event in ("socket.bind", "socket.__new__"):
            _handlers[event] = _calling(self._if_users, "makes a socket")
        for event in ("os.putenv", "os.unsetenv"):
            _handlers[event] = self._sets_variable
        for event in ("os.listdir", "os.scandir"):
            _handlers[event] = self._lists
        _handlers["open"] = self._opens
        sys.addaudithook(_audit)

    def end(self) -> None:
        """Everything is as it was, but for an audit hook that does nothing."""
        _handlers.clear()
        self._end_environ()
        self._replaced.undo()

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Let it be something else meanwhile."""
        self._replaced.put(owner, name, value)

    # -- what is noticed ------------------------------------------------------------------------------

    def _if_users(self, what: str) -> None:
        if users_frame(sys._getframe(1)) is not None:
            self._stop(what)

    def _if_changed_by_user(self, what: str) -> None:
        frame = sys._getframe(1)
        users = users_frame(frame)
        if users is not None and not is_librarys(frame) and not _is_called(_LEAVES_NO_FILE, frame, users):
            self._stop(what)

    def _walks(self) -> None:
        self._if_users("reads all of os.environ")

    def _sets_variable(self, arguments: Any) -> None:
        """Not in ``os.environ``, but where what it starts will find it."""
        if tells_ranks_apart(os.fsdecode(arguments[0])):
            self._stop(f"sets {os.fsdecode(arguments[0])}")

    def _starts_program(self, arguments: Any) -> None:
        # libraries, and a checkout of Megatron, ask git and ldconfig while they are imported, and wait for the answer
        if not in_import(sys._getframe(1)) or any(map(tells_ranks_apart, re.findall(r"\w+", str(arguments)))):
            self._stop("starts a program")

    def _lists(self, arguments: Any) -> None:
        path = arguments[0] if arguments and arguments[0] is not None else "."
        if not isinstance(path, int) and users_frame(sys._getframe(1)) is not None:
            self._note(path, listed=True)

    def _note(self, path: Any, *, listed: bool = False) -> None:
        """The script looks at a file. So many can't be looked at again in a moment."""
        self.looked.note(os.fsdecode(path), listed=listed)
        if len(self.looked) > _MOST_FILES:
            self._stop(f"has looked at {_MOST_FILES} files")

    def _opens(self, arguments: Any) -> None:
        path, _, flags = arguments
        if path in _STANDARD_INPUT:
            self._stop("reads standard input")
            return
        if isinstance(path, int) or path == os.devnull:
            return
        text = os.fsdecode(path)
        if isinstance(flags, int) and flags & _WRITES:
            self._if_changed_by_user(f"opens {os.path.basename(text)} to write")
        elif is_own(text) and (text.endswith((".py", ".pyc")) or users_frame(sys._getframe(1)) is not None):
            self._note(text)

    # -- functions that raise no audit event ----------------------------------------------------------

    def _replace_functions(self) -> None:
        replace = self._replaced.replace
        replace(time, "sleep", lambda *_: self._if_users("sleeps"))
        for name in ("urandom", "getrandom"):
            replace(os, name, lambda *_, **__: self._if_users("draws random numbers"))
        for name in ("getpid", "getpgrp", "getpgid", "getsid"):
            replace(os, name, lambda *_: self._asks_who_it_is())
        for name in ("_exit", "abort"):
            replace(os, name, lambda *_, **__: self._stop("ends"))
        for name in ("alarm", "setitimer", "raise_signal", "pause", "sigwait", "sigwaitinfo", "sigtimedwait"):
            replace(signal, name, lambda *_, **__: self._stop("waits for a signal, or sets a timer"))
        for name in ("stat", "lstat", "access"):
            replace(os, name, self._looks_for)
        for name in ("pipe", "pipe2"):
            replace(os, name, self._makes_pipe)
        replace(threading.Thread, "start", lambda *_: self._stop("starts a thread"))
        replace(socket.socket, "listen", lambda *_: self._stop("listens"))
        replace(threading, "_shutdown", lambda: self._stop("ends"))

    def _asks_who_it_is(self) -> None:
        frame = sys._getframe(3)  # behind this, the lambda, and what stands for the function
        asks: dict[str, Callable[[], bool]] = {"logging": _logs_show_process, "tempfile": lambda: False}
        asks_for_itself = asks.get(frame.f_globals.get("__name__", ""))
        if users_frame(frame) is not None and (asks_for_itself is None or asks_for_itself()):
            self._stop("asks for its process id")

    def _looks_for(self, path: Any, *_arguments: Any, **named: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)) or named.get("dir_fd") is not None:
            return
        caller = sys._getframe(2)
        if "realpath" not in caller.f_code.co_name and users_frame(caller) is not None:
            self._note(path)

    def _stopping(self, function: str, what: str) -> Callable[[Any, Callable[..., None]], None]:
        """To be called with a module that was imported: it has that function, maybe in a class."""
        *classes, name = function.split(".")

        def hook(module: Any, replace: Callable[..., None]) -> None:
            owner = functools.reduce(lambda found, inner: getattr(found, inner, None), classes, module)
            if owner is not None:
                replace(owner, name, lambda *_, **__: self._stop(what))

        return hook

    def _answer_without_cuda(self, torch: Any, _replace: Callable[..., None]) -> None:
        answer_without_cuda(torch, self._replaced, self._stop, self.unwatched)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """What is done meanwhile isn't the script's."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def _makes_pipe(self, *_flags: Any) -> None:
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__") == "subprocess":
            self._starts_program(None)
        else:
            self._stop("makes a pipe")


def _calling(function: Callable[[str], None], what: str) -> Callable[[Any], None]:
    return lambda _arguments: function(what)


def _is_called(name: str, frame: Any, until: Any) -> bool:
    while frame is not None and frame is not until:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def _logs_show_process() -> bool:
    """Whether some handler writes the number of the process, which each record carries."""
    logging: Any = sys.modules["logging"]
    handlers = [reference() for reference in logging._handlerList]
    formatters = [formatter for handler in handlers if (formatter := getattr(handler, "formatter", None))]
    # one that formats in its own way may well write it
    return any(
        type(formatter).format is not logging.Formatter.format or "process" in (formatter._fmt or "")
        for formatter in formatters
    )
