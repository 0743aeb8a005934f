"""A process that runs a script ahead, as a fork of the launcher that asks for it: see ``forked_launcher``."""

from __future__ import annotations

import atexit
import contextlib
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

from tests.support import process_title

__all__ = ["RunsAhead", "leave", "popen", "told"]

_VARIABLE = "MEGATRON_FT_RUN_AHEAD"
"""In the environment of such a process, and of no other; a literal, for the launcher is to import ours itself."""


class RunsAhead(BaseException):
    """Raised in the fork: it leaves the launcher's calls, which go on in the launcher, and then runs the script."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], fd: tuple[int, int], known: set[str]) -> None:
        """``fd``: the number of one that stays open, and where it is meanwhile. ``known``: modules it has imported."""
        super().__init__()
        self._command, self._env, self._fd, self._known = list(command), dict(env), fd, known

    def run(self) -> NoReturn:
        """Be ``python -u SCRIPT ...`` or ``python -u -m MODULE ...``, as Python does it."""
        number, held = self._fd
        os.dup2(held, number, inheritable=True)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        os.closerange(3, number)
        os.closerange(number + 1, highest + 1)
        os.environ.clear()
        os.environ.update(self._env)
        process_title.set_command_line(self._command)
        forgotten = {name: sys.modules[name] for name in sys.modules.keys() - self._known}
        for name in forgotten:
            package, _, last = name.rpartition(".")
            if package.startswith("megatron_ft"):  # else `from package import module` would import nothing
                vars(sys.modules[package] if package in self._known else forgotten[package]).pop(last, None)
            del sys.modules[name]
        for stream, fd in (("stdout", 1), ("stderr", 2)):
            _replace_stream(stream, fd)
        is_module = self._command[2] == "-m"
        words = self._command[4:] if is_module else self._command[3:]
        script = self._command[3] if is_module else self._command[2]
        sys.orig_argv = self._command
        startup = self._env["PYTHONPATH"].split(os.pathsep)[0]
        sys.path[0] = startup
        sys.argv = ["-m" if is_module else script, *words]
        main = sys.modules["__main__"] = ModuleType("__main__")
        with contextlib.suppress(ModuleNotFoundError):  # it looks for one that it hides
            importlib.import_module("sitecustomize")
        _watch_collectives()
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(script)))
        code = 0
        try:
            if is_module:
                runpy._run_module_as_main(script)  # type: ignore[attr-defined]
            else:
                _run_script(script, main)
        except SystemExit as end:
            code = told(end.code)
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
        leave(code)


def told(code: object) -> int:
    """What a SystemExit means."""
    if isinstance(code, int | None):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def leave(code: int) -> NoReturn:
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


def _watch_collectives() -> None:
    """The function that is watched is replaced where it is defined; the import of torch, done here, has copied it."""
    defined: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if defined is not None:
        sys.modules["torch.distributed"].init_process_group = defined.init_process_group  # type: ignore[attr-defined]


def _replace_stream(name: str, fd: int) -> None:
    old = getattr(sys, name)
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = f"<{name}>"  # type: ignore[misc]
    new = io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)  # type: ignore[type-var]
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def _run_script(path: str, main: ModuleType) -> None:
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(code, main.__dict__)


class _Forked:
    """What the launcher has of it, of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Reap it, if it has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def popen(known: set[str]) -> Callable[..., Any]:
    """In the place of that of ``forked_helpers``: itself, but for the first process that runs a script ahead.

    ``known``: the modules that the launcher has imported before it has begun.
    """
    real = subprocess.Popen

    class Popen(real):  # type: ignore[type-arg,misc]
        def __new__(cls, command: Any, *args: Any, **options: Any) -> Any:
            # later ones would be forks of a process with threads, and with all that a launcher knows
            if _VARIABLE in (options.get("env") or {}) and "torch" not in sys.modules:
                return _fork(command, known, options)
            return super().__new__(cls, command, *args, **options)

    return Popen


def _fork(command: Sequence[str], known: set[str], options: Mapping[str, Any]) -> _Forked:
    outputs = [options[name] for name in ("stdout", "stderr")]
    (number,) = options["pass_fds"]
    pid = os.fork()
    if pid:
        return _Forked(pid)
    os.setsid()
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), fd)
    raise RunsAhead(command, options["env"], (number, os.dup(number)), known)
