"""What a launcher starts for itself, as forks of it (see ``forked_launcher``): most of what a short launch costs beside
torch is the start of their interpreters.

Monitors and coordinators are what a test can see of such a process: session, descriptors, signals, command line,
environment. So is, where that is asked for, the first process that runs a script ahead. What they inherit of a launcher
is tested with fresh ones.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["PACKAGES", "RunsAhead", "popen", "room", "take_on"]

PACKAGES = ("megatron_ft.monitor", "megatron_ft.job")
_PROGRAM, _WORDS = 4, 6
"""Places in a command of ``isolated_command``: the program, which names the package, and the words for it."""
_VARIABLE = "MEGATRON_FT_RUN_AHEAD"
"""In the environment of a process that runs ahead alone; a literal, for the launcher is to import ours itself."""
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_ARG_END = 15, 35, 9
_ARG_START, _ARG_END = 47, 48
"""Fields of /proc/PID/stat, counted from 0."""
_KEPT: list[Any] = []
"""The launcher's streams: one that is freed writes what it holds, as the launcher will, too."""


def room() -> tuple[int, int]:
    """Where in memory the kernel finds the command line of this process and its forks; asked before it is shorter."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()  # the process id and the name come before
    return int(fields[_ARG_START - 2]), int(fields[_ARG_END - 2])


def take_on(command: Sequence[str], env: Mapping[str, str], place: tuple[int, int], kept: Sequence[int] = ()) -> None:
    """Be what that command starts, as after an exec: environment, descriptors, what ``ps`` shows. Zeros may follow."""
    kept = sorted(kept)
    for low, high in zip([2, *kept], [*kept, 1 + max(map(int, os.listdir("/proc/self/fd")))], strict=True):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [*command]
    libc, (start, end) = ctypes.CDLL(None), place
    libc.prctl(_PR_SET_NAME, os.fsencode(os.path.basename(command[0])), 0, 0, 0)
    text = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    libc.prctl(_PR_SET_MM, _PR_SET_MM_ARG_END, ctypes.c_ulong(start + max(len(text), 1)), 0, 0)


def popen(place: tuple[int, int], known: set[str] | None) -> Any:
    """In the place of ``subprocess.Popen``: itself, but in this process for the commands that start ``PACKAGES``.

    ``known``: modules that the launcher has imported before it begins; then the first process that runs a script ahead
    is a fork, too. Later ones would be forks of a process with threads, and with all that a launcher knows.
    """
    real, launcher = subprocess.Popen, os.getpid()

    class Popen(real):  # type: ignore[type-arg,misc]
        def __new__(cls, command: Any, *_args: Any, **options: Any) -> Any:
            if os.getpid() == launcher and (package := _package(command)):
                return _started(package, command, options)
            if known is not None and _VARIABLE in (options.get("env") or {}) and "torch" not in sys.modules:
                return _Forked(command, _fork_ahead(command, known, options, place))
            return object.__new__(cls)

    class _Forked(real):  # type: ignore[type-arg,misc]
        """A process that is there already."""

        def __init__(self, command: Sequence[str], pid: int) -> None:
            self.args, self.pid, self.returncode = command, pid, None
            self.stdin = self.stdout = self.stderr = None
            self._child_created = True
            self._waitpid_lock = threading.Lock()

    def _started(package: str, command: Sequence[str], options: Mapping[str, Any]) -> _Forked:
        pipes = {name: os.pipe() for name in ("stdin", "stdout") if options.get(name) == subprocess.PIPE}
        forked = _Forked(command, _fork_helper(package, command, {**options, **pipes}, place))
        for name, (reads, writes) in pipes.items():
            ours, theirs = (writes, reads) if name == "stdin" else (reads, writes)
            os.close(theirs)
            setattr(forked, name, open(ours, "wb" if name == "stdin" else "rb"))  # noqa: SIM115 - as Popen's
        return forked

    return Popen


def _package(command: Any) -> str | None:
    """Which of ``PACKAGES`` the command starts."""
    if not isinstance(command, list) or command[:_PROGRAM] != [sys.executable, "-I", "-S", "-c"]:
        return None
    return next((package for package in PACKAGES if f"from {package}.__main__ import main" in command[_PROGRAM]), None)


def _fork_helper(package: str, command: Sequence[str], options: Mapping[str, Any], place: tuple[int, int]) -> int:
    """The process id of a monitor or coordinator, which runs on top of the launcher's calls; they never go on there."""
    assert options["start_new_session"]
    is_ready, ready = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready)
        with open(is_ready, "rb") as told:
            told.read()
        return pid
    code = 1
    try:
        _become_helper(command, options, place, ready)
        code = _exit_code(importlib.import_module(f"{package}.__main__").main())
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as error:  # noqa: BLE001 - what Python would tell of
        sys.excepthook(type(error), error, error.__traceback__)
    try:
        _leave(code)
    finally:
        os._exit(1)


def _become_helper(command: Sequence[str], options: Mapping[str, Any], place: tuple[int, int], ready: int) -> None:
    gc.freeze()  # what is freed later must close none of our descriptors by their number
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd, given in enumerate((options["stdin"], options.get("stdout"))):
        if given is not None:
            os.dup2(null if given == subprocess.DEVNULL else given[fd], fd)
    env = os.environ if options.get("env") is None else options["env"]
    take_on(command, dict(env), place, [*options["pass_fds"], ready])
    for fd in options["pass_fds"]:
        os.set_inheritable(fd, True)
    _KEPT.append(sys.stdin)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the whole process
    _replace_outputs()
    sys.argv = ["-c", *command[_WORDS:]]
    os.close(ready)


def _replace_outputs() -> None:
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        raw = io.FileIO(fd, "w", closefd=False)
        raw.name = f"<{name}>"  # type: ignore[misc]
        new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)  # type: ignore[type-var]
        _KEPT.extend([old, getattr(sys, f"__{name}__")])
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _exit_code(code: object) -> int:
    """What a SystemExit means."""
    if isinstance(code, int | None):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """As Python ends, but for taking itself and torch down, which is most of what an end costs."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that aren't daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _fork_ahead(command: Sequence[str], known: set[str], options: Mapping[str, Any], place: tuple[int, int]) -> int:
    outputs = [options[name] for name in ("stdout", "stderr")]
    (number,) = options["pass_fds"]
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), fd)
    raise RunsAhead(
        command, (number, os.dup(number)), known, functools.partial(take_on, command, dict(options["env"]), place)
    )


class RunsAhead(BaseException):
    """Raised in the fork: it leaves the launcher's calls, which go on in the launcher, and then runs the script."""

    def __init__(
        self, command: Sequence[str], fd: tuple[int, int], known: set[str], take_on: Callable[..., None]
    ) -> None:
        """``fd``: the number of one that stays open, and where it is meanwhile. ``known``: modules it has imported."""
        super().__init__()
        self._command, self._fd, self._known, self._take_on = list(command), fd, known, take_on

    def run(self) -> NoReturn:
        """Be ``python -u SCRIPT ...`` or ``python -u -m MODULE ...``, as Python does it."""
        number, held = self._fd
        os.dup2(held, number, inheritable=True)
        self._take_on(kept=[number])
        forgotten = {name: sys.modules[name] for name in sys.modules.keys() - self._known}
        for name in forgotten:
            package, _, last = name.rpartition(".")
            if package.startswith("megatron_ft"):  # else `from package import module` would import nothing
                vars(sys.modules[package] if package in self._known else forgotten[package]).pop(last, None)
            del sys.modules[name]
        _replace_outputs()
        is_module = self._command[2] == "-m"
        words = self._command[4:] if is_module else self._command[3:]
        script = self._command[3] if is_module else self._command[2]
        sys.path[0] = os.environ["PYTHONPATH"].split(os.pathsep)[0]
        sys.argv = ["-m" if is_module else script, *words]
        main = sys.modules["__main__"] = ModuleType("__main__")
        with contextlib.suppress(ModuleNotFoundError):  # it looks for one that it hides
            importlib.import_module("sitecustomize")
        # the function that is watched is replaced where it is defined; the import of torch, done here, has copied it
        defined: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if defined is not None:
            sys.modules["torch.distributed"].init_process_group = defined.init_process_group  # type: ignore[attr-defined]
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(script)))
        code = 0
        try:
            if is_module:
                runpy._run_module_as_main(script)  # type: ignore[attr-defined]
            else:
                _run_script(script, main)
        except SystemExit as end:
            code = _exit_code(end.code)
        except BaseException as error:  # noqa: BLE001 - what Python would tell of, without what is below the script
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
            sys.last_exc = error
            reporter: Any = sys.modules.get("megatron_ft.rank.crash_reporter.reporter")
            if reporter is not None:
                reporter.ends_main_thread = lambda: True  # as Python's own call, below which no frame is left
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        _leave(code)


def _run_script(path: str, main: ModuleType) -> None:
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(code, main.__dict__)
