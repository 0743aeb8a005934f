"""Sees a script's first act that ranks can't share, before it happens. For a script that is run ahead."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
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
_MOST_FILES = 20_000
_LEAVES_NO_FILE = "_get_default_tempdir"
"""Of ``tempfile``: it tries whether a directory can be written."""

# Audit events, and functions that raise none: what the script does there.
_NEVER_SHARED = {
    "forks": "os.fork os.forkpty",
    "becomes another program": "os.exec",
    "starts a thread": "_thread.start_new_thread _thread.start_joinable_thread",
    "connects, or sends": "socket.connect socket.sendto socket.sendmsg",
    "locks a file": "fcntl.flock fcntl.lockf",
    "reads standard input": "builtins.input",
    "sends a signal": "os.kill os.killpg signal.pthread_kill",
    "writes to the system's log": "syslog.syslog syslog.openlog",
}
_CHANGES_FILES = (
    "os.mkdir os.remove os.rename os.rmdir os.link os.symlink os.truncate os.chmod os.chown os.utime os.setxattr "
    "os.removexattr tempfile.mkstemp tempfile.mkdtemp shutil.rmtree shutil.move shutil.copyfile sqlite3.connect"
)
_STARTS_PROGRAM = "subprocess.Popen os.system os.posix_spawn os.spawn"
_FUNCTIONS_NEVER_SHARED = {
    "ends": {"os": "_exit abort", "threading": "_shutdown"},
    "starts a thread": {"threading": "Thread.start"},
    "listens": {"socket": "socket.listen"},
    "waits for a signal, or sets a timer": {
        "signal": "alarm setitimer raise_signal pause sigwait sigwaitinfo sigtimedwait"
    },
    "changes which signals wait": {"signal": "pthread_sigmask"},
    "starts a process": {"multiprocessing.util": "spawnv_passfds"},
    "makes a lock for processes": {"multiprocessing.synchronize": "SemLock.__init__"},
    "makes an event loop": {"asyncio.base_events": "BaseEventLoop.__init__"},
    "makes a process group": {
        **dict.fromkeys(("torch.distributed.distributed_c10d", "torch.distributed"), "init_process_group")
    },
    "saves a file": dict.fromkeys(("torch.serialization", "torch"), "save"),
    "makes a number that nobody else has": {"uuid": "uuid1"},
}
_FUNCTIONS_OF_USERS = {"sleeps": {"time": "sleep"}}
_DRAW_FOR_OTHERS = ("random", "secrets", "uuid", "importlib.", "megatron_ft.rank.replacing")
_DRAW_HARMLESSLY = ("multiprocessing.process", "numpy.random", "torch.distributed._composable.contract")
"""While they are imported: a key and seeds that each rank makes anew; names of no meaning."""

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
        self.randomness = Randomness(self._stop, self._if_changed_by_user)
        self.replaced = Replacements()
        self._end_environ: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Once in a process."""
        self._end_environ = watch_environ(
            lambda name: self._stop(f"reads {name}"),
            lambda: self._if_users("reads all of os.environ"),
            lambda: self._stop("copies os.environ"),
        )
        self._watch_functions()
        for what, events in _NEVER_SHARED.items():
            self._watch_events(events, functools.partial(self._stop, what))
        for event in _CHANGES_FILES.split():
            self._watch_events(event, functools.partial(self._if_changed_by_user, f"changes files ({event})"))
        _handlers.update(dict.fromkeys(_STARTS_PROGRAM.split(), self._starts_program))
        self._watch_events("socket.bind socket.__new__", functools.partial(self._if_users, "makes a socket"))
        _handlers["open"] = self._opens
        for event in ("os.listdir", "os.scandir"):
            _handlers[event] = self._lists
        for event in ("os.putenv", "os.unsetenv"):
            _handlers[event] = self._sets_variable
        sys.addaudithook(_audit)

    def end(self) -> None:
        """Everything is as it was, but for an audit hook that does nothing."""
        _handlers.clear()
        self._end_environ()
        self.replaced.undo()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """What is done meanwhile isn't the script's."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def _watch_events(self, events: str, act: Callable[[], None]) -> None:
        _handlers.update(dict.fromkeys(events.split(), lambda _arguments: act()))

    def _watch_functions(self) -> None:
        when_imported = self.replaced.when_imported
        for table, check in ((_FUNCTIONS_NEVER_SHARED, self._stop), (_FUNCTIONS_OF_USERS, self._if_users)):
            for what, modules in table.items():
                for module, names in modules.items():
                    act = functools.partial(check, what)
                    when_imported(module, functools.partial(self._replace, names, lambda *_, act=act, **__: act()))
        for module, names, before in (
            ("os", "getpid getpgrp getpgid getsid", self._asks_who_it_is),
            ("threading", "get_native_id", self._asks_who_it_is),
            ("os", "stat lstat access", self._looks_for),
            ("os", "urandom getrandom", self._draws),
            ("random", "_urandom", self._draws),
            ("os", "readlink", self._reads_link),
            ("os", "pipe pipe2", self._makes_pipe),
        ):
            when_imported(module, functools.partial(self._replace, names, before))
        for module, hook in self.randomness.hooks().items():
            when_imported(module, hook)
        when_imported("torch", lambda torch, _: answer_without_cuda(torch, self.replaced, self._stop, self.unwatched))

    def _replace(self, names: str, before: Callable[..., None], module: Any, replace: Callable[..., None]) -> None:
        for name in names.split():
            *inside, last = name.split(".")
            replace(functools.reduce(lambda owner, inner: getattr(owner, inner, None), inside, module), last, before)

    # -- who does it --------------------------------------------------------------------------------------

    def _if_users(self, what: str) -> None:
        if users_frame(sys._getframe(1)) is not None:
            self._stop(what)

    def _if_changed_by_user(self, what: str) -> None:
        frame = sys._getframe(1)
        users = users_frame(frame)
        if users is not None and not is_librarys(frame) and not _is_called(_LEAVES_NO_FILE, frame, users):
            self._stop(what)

    def _starts_program(self, arguments: Any) -> None:
        # libraries, and a checkout of Megatron, ask git and ldconfig while they are imported, and wait for the answer
        if not in_import(sys._getframe(1)) or any(map(tells_ranks_apart, re.findall(r"\w+", str(arguments)))):
            self._stop("starts a program")

    def _makes_pipe(self, *_flags: Any) -> None:
        caller = sys._getframe(2)
        if caller.f_globals.get("__name__") == "subprocess" and caller.f_back is not None:
            self._starts_program([caller.f_back.f_locals.get(name) for name in ("args", "env")])  # of Popen.__init__
        else:
            self._stop("makes a pipe")

    def _asks_who_it_is(self, *_arguments: Any) -> None:
        frame = sys._getframe(2)
        asks: dict[str, Callable[[], bool]] = {"logging": _logs_show_process, "tempfile": lambda: False}
        asks_for_itself = asks.get(frame.f_globals.get("__name__", ""))
        if users_frame(frame) is not None and (asks_for_itself is None or asks_for_itself()):
            self._stop("asks for its process id")

    def _draws(self, *_arguments: Any) -> None:
        """From the system: what a library keeps of it would be the same in all ranks."""
        frame: Any = sys._getframe(2)
        is_users = users_frame(frame) is not None
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_DRAW_FOR_OTHERS):
            frame = frame.f_back
        if is_users or frame is None or not frame.f_globals.get("__name__", "").startswith(_DRAW_HARMLESSLY):
            self._stop("draws random numbers")

    def _sets_variable(self, arguments: Any) -> None:
        """Not in ``os.environ``, but where what it starts will find it."""
        if tells_ranks_apart(os.fsdecode(arguments[0])):
            self._stop(f"sets {os.fsdecode(arguments[0])}")

    # -- files --------------------------------------------------------------------------------------------

    def _opens(self, arguments: Any) -> None:
        path, _, flags = arguments
        if path in _STANDARD_INPUT:
            self._stop("reads standard input")
            return
        if isinstance(path, int) or path == os.devnull:
            return
        text = os.fsdecode(path)
        if text.startswith("/proc/self/"):
            self._if_changed_by_user("asks for its process")
        if isinstance(flags, int) and flags & _WRITES:
            self._if_changed_by_user(f"opens {os.path.basename(text)} to write")
        elif is_own(text) and (text.endswith((".py", ".pyc")) or users_frame(sys._getframe(1)) is not None):
            self._note(text)

    def _lists(self, arguments: Any) -> None:
        path = arguments[0] if arguments and arguments[0] is not None else "."
        if not isinstance(path, int) and users_frame(sys._getframe(1)) is not None:
            self._note(path, listed=True)

    def _looks_for(self, path: Any, *_arguments: Any, **named: Any) -> None:
        caller = sys._getframe(2)
        if "realpath" not in caller.f_code.co_name:
            self._note_if_users(path, caller, **named)

    def _reads_link(self, path: Any, *_arguments: Any, **named: Any) -> None:
        self._note_if_users(path, sys._getframe(2), **named)

    def _note_if_users(self, path: Any, caller: Any, *, dir_fd: int | None = None, **_named: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)) and dir_fd is None and users_frame(caller) is not None:
            self._note(path)

    def _note(self, path: Any, *, listed: bool = False) -> None:
        """Looked at again before each cycle; so many can't be in a moment."""
        self.looked.note(os.fsdecode(path), listed=listed)
        if len(self.looked) > _MOST_FILES:
            self._stop(f"has looked at {_MOST_FILES} files")


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
