"""Detects a script's first act that ranks can't share, before it happens. For a script that is run ahead."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_ft.core.run_ahead import tells_ranks_apart
from megatron_ft.rank.base.replacing import Replacements
from megatron_ft.rank.run_ahead.call_stack import (
    callers,
    environment_reader,
    in_import,
    is_for_log,
    is_for_users_import,
    is_own,
    is_users,
    module_of,
    reads_times,
)
from megatron_ft.rank.run_ahead.clock import watch_clock
from megatron_ft.rank.run_ahead.cuda_questions import answer_without_cuda
from megatron_ft.rank.run_ahead.environ import watch_environ
from megatron_ft.rank.run_ahead.randomness import Randomness
from megatron_ft.rank.run_ahead.read_files import ReadFiles

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STANDARD_INPUT = (0, "/dev/stdin", "/proc/self/fd/0", "/dev/fd/0", "/dev/tty")
_MOST_FILES = 20_000
_C_FUNCTIONS = frozenset(
    {"system", "popen", "fork", "vfork", "posix_spawn", "posix_spawnp", "getenv", "secure_getenv", "environ"}
)
"""Names that a user's file looks up in a C library only to start a program, or to read a variable."""
_LEAVES_NO_FILE = "_get_default_tempdir"
"""Function of ``tempfile`` that tests whether a directory can be written."""

# Acts by description: audit events, and functions that raise none, as module:name.
_NEVER_SHARED = {
    "forks": "os.fork os.forkpty",
    "executes another program": "os.exec",
    "ends": "os:_exit os:abort threading:_shutdown",
    "starts a thread": "_thread.start_new_thread _thread.start_joinable_thread threading:Thread.start",
    "uses a network connection": "socket.connect socket.sendto socket.sendmsg",
    "listens": "socket:socket.listen",
    "locks a file": "fcntl.flock fcntl.lockf",
    "reads standard input": "builtins.input",
    "sends a signal": "os.kill os.killpg signal.pthread_kill",
    "waits for a signal, or sets a timer": (
        "signal:alarm signal:setitimer signal:raise_signal "
        "signal:pause signal:sigwait signal:sigwaitinfo signal:sigtimedwait"
    ),
    "blocks signals": "signal:pthread_sigmask",
    "writes to the system's log": "syslog.syslog syslog.openlog",
    "creates a multiprocessing lock": "multiprocessing.synchronize:SemLock.__init__",
    "makes an event loop": "asyncio.base_events:BaseEventLoop.__init__",
    "makes a process group": (
        "torch.distributed.distributed_c10d:init_process_group torch.distributed:init_process_group"
    ),
    "saves a file": "torch.serialization:save torch:save",
    "generates a UUID": "uuid:uuid1",
}
_IF_USERS = {"makes a socket": "socket.bind socket.__new__", "sleeps": "time:sleep"}
_CHANGES_FILES = (
    "os.mkdir os.remove os.rename os.rmdir os.link os.symlink os.truncate os.chmod os.chown os.utime os.setxattr "
    "os.removexattr shutil.rmtree shutil.move shutil.copyfile sqlite3.connect"
)
_TEMPORARY = (
    "tempfile.mkstemp tempfile.mkdtemp tempfile:mkstemp tempfile:mkdtemp tempfile:mktemp tempfile:TemporaryFile "
    "tempfile:NamedTemporaryFile tempfile:TemporaryDirectory.__init__ tempfile:SpooledTemporaryFile.__init__"
)
_REMOVE_AT_ONCE = ("ctypes.util", "filelock._strict")
"""Modules of libraries that make a temporary file and remove it at once: for gcc, and to see whether links work."""
_DRAW_FOR_OTHERS = ("random", "secrets", "uuid", "importlib.")
_DRAW_HARMLESSLY = ("multiprocessing.process", "numpy.random", "torch.distributed._composable.contract")
"""Modules whose draws during import are harmless: a key and seeds that each rank makes anew; names without meaning."""

_handlers: dict[str, Callable[..., None]] = {}
"""Handlers by audit event. An audit hook can't be removed: in ranks it finds this empty."""


def _audit(event: str, arguments: Any) -> None:
    handler = _handlers.get(event)
    if handler is not None:
        handler(*arguments)


class Watch:
    """Calls ``stop`` before the script changes anything outside this process, from ``begin`` to ``end``."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        """``stop`` is called with a description of the next act; it returns only in a rank, where the act is done."""
        self._is_quiet = False
        self._stop: Callable[[str], None] = lambda what: None if self._is_quiet else stop(what)
        self.files = ReadFiles()
        self.replaced = Replacements()
        self.randomness = Randomness(self.replaced, self._stop, self._if_changed_by_user)

    def begin(self) -> None:
        """Start watching; once per process."""
        watch_environ(
            self.replaced,
            lambda name: self._stop(f"reads {name}"),
            lambda: self._reads_environment("reads all of os.environ"),
            lambda: self._stop(_by("copies os.environ", environment_reader())),
            lambda: self._if_users("counts os.environ"),
        )
        watch_clock(self.replaced, self._reads_clock)
        changes = {f"changes files ({event})": event for event in _CHANGES_FILES.split()}
        checks = (self._stop, _NEVER_SHARED), (self._if_users, _IF_USERS), (self._if_changed_by_user, changes)
        for check, table in checks:
            for what, names in table.items():
                self._watch(names, lambda *_, check=check, what=what, **__: check(what))
        for names, before in (
            ("subprocess.Popen os.system os.posix_spawn os.spawn", self._starts_program),
            ("os:pipe os:pipe2", self._makes_pipe),
            (_TEMPORARY, self._makes_temporary_file),
            ("os:getpid os:getpgrp os:getpgid os:getsid threading:get_native_id", self._asks_who_it_is),
            ("os:urandom os:getrandom random:_urandom", self._draws),
            ("os.putenv os.unsetenv", self._sets_variable),
            ("ctypes.dlsym", self._looks_up_function),
            ("open", self._opens),
            ("os.listdir os.scandir", self._lists),
            ("os:stat os:lstat os:access", self._looks_for),
            ("os:readlink", self._note_if_users),
        ):
            self._watch(names, before)
        self.replaced.when_imported(
            "torch", lambda torch: answer_without_cuda(torch, self.replaced, self._stop, self.unwatched)
        )
        sys.addaudithook(_audit)

    def end(self) -> None:
        """Undo everything, except an audit hook that does nothing."""
        _handlers.clear()
        self.replaced.undo()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Suspend the watch within the block, for acts that aren't the script's."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def _watch(self, names: str, before: Callable[..., None]) -> None:
        """Call ``before`` with the arguments of these events and functions."""
        for each in names.split():
            module, is_function, name = each.partition(":")
            if is_function:
                self.replaced.when_imported(module, partial(self.replaced.replace, name=name, before=before))
            else:
                _handlers[each] = before

    # -- who acts -----------------------------------------------------------------------------------------

    def _if_users(self, what: str) -> None:
        if is_users():
            self._stop(what)

    def _if_changed_by_user(self, what: str) -> None:
        if is_users() and not is_for_users_import() and all(f.f_code.co_name != _LEAVES_NO_FILE for f in callers()):
            self._stop(what)

    def _reads_environment(self, what: str) -> None:
        reader = environment_reader()
        if reader or is_users():
            self._stop(_by(what, reader))

    def _reads_clock(self, what: str) -> None:
        if is_users() and not is_for_log():
            self._stop(what)

    def _starts_program(self, *arguments: Any) -> None:
        # libraries, and a checkout of Megatron, call git and ldconfig during import, and wait for the answer
        is_allowed = in_import() and not is_users(megatron=False)
        if not is_allowed or any(map(tells_ranks_apart, re.findall(r"\w+", str(arguments)))):
            self._stop("starts a program")

    def _makes_pipe(self, *_flags: Any) -> None:
        caller = next(callers())
        if module_of(caller) == "subprocess" and caller.f_back is not None:
            # the frame of Popen.__init__
            self._starts_program(*(caller.f_back.f_locals.get(name) for name in ("args", "env")))
        else:
            self._stop("makes a pipe")

    def _makes_temporary_file(self, *_arguments: Any, **_named: Any) -> None:
        makers = (name for name in map(module_of, callers()) if name != "tempfile")
        if is_users() or next(makers, "") not in _REMOVE_AT_ONCE:
            self._stop("makes a temporary file")

    def _asks_who_it_is(self, *_arguments: Any) -> None:
        asker = module_of(next(callers()))
        if is_users() and asker != "tempfile" and (asker != "logging" or _logs_show_process()):
            self._stop("asks for its process id")

    def _draws(self, *_arguments: Any) -> None:
        """Stop at a draw from the system: what a library keeps of it would be the same in all ranks."""
        modules = (name for name in map(module_of, callers()) if not name.startswith(_DRAW_FOR_OTHERS))
        if is_users() or not next(modules, "").startswith(_DRAW_HARMLESSLY):
            self._stop("draws random numbers")

    def _sets_variable(self, name: Any, *_value: Any) -> None:
        """Stop at a variable set outside ``os.environ``, where programs started by the script will find it."""
        if tells_ranks_apart(os.fsdecode(name)):
            self._stop(f"sets {os.fsdecode(name)}")

    def _looks_up_function(self, _library: Any, name: Any) -> None:
        if name in _C_FUNCTIONS:
            self._if_users(f"calls {name} of a C library")

    # -- files --------------------------------------------------------------------------------------------

    def _opens(self, path: Any, _mode: Any, flags: Any) -> None:
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
        elif is_own(text) and (text.endswith((".py", ".pyc")) or is_users()):
            self._note(text)

    def _lists(self, path: Any = None) -> None:
        if not isinstance(path, int) and is_users():
            self._note("." if path is None else path, listed=True)

    def _looks_for(self, path: Any, *_arguments: Any, **named: Any) -> None:
        if "realpath" not in next(callers()).f_code.co_name:
            self._note_if_users(path, listed=reads_times(), **named)

    def _note_if_users(
        self, path: Any, *_: Any, listed: bool = False, dir_fd: int | None = None, **_named: Any
    ) -> None:
        if isinstance(path, (str, bytes, os.PathLike)) and dir_fd is None and is_users():
            self._note(path, listed=listed)

    def _note(self, path: Any, *, listed: bool = False) -> None:
        """Note a file. All are checked again before each cycle, so their number is limited."""
        self.files.note(os.fsdecode(path), listed=listed)
        if len(self.files) > _MOST_FILES:
            self._stop(f"looks up more than {_MOST_FILES} files")


def _logs_show_process() -> bool:
    """Return True if a handler writes the process number, which each record carries."""
    logging: Any = sys.modules["logging"]
    formatters = [getattr(reference(), "formatter", None) or logging.Formatter() for reference in logging._handlerList]
    # a formatter with its own format method may write it
    return any(
        type(each).format is not logging.Formatter.format or "process" in (each._fmt or "") for each in formatters
    )


def _by(what: str, library: str | None) -> str:
    """Return the act, with the library that does it if it isn't the user."""
    return f"{what}, in {library}" if library else what
