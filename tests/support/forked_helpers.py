"""The processes that a launcher starts for itself, monitors and coordinators, as forks of it: see ``forked_launcher``.

Most of what a short launch costs beside torch is the start of their interpreters. What is theirs in a fork is all that
a test can see: session, descriptors, signals, command line, environment. What they inherit of a launcher is tested with
fresh ones.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tests.support import process_title
from tests.support.forked_script_ahead import leave, told

__all__ = ["PACKAGES", "popen"]

PACKAGES = ("megatron_ft.monitor", "megatron_ft.job")
_PROGRAM, _WORDS = 4, 6
"""Places in a command of ``isolated_command``: the program, which names the package, and the words for it."""


def popen(room: process_title.Room | None) -> Any:
    """In the place of ``subprocess.Popen``: itself, but in this process for the commands that start ``PACKAGES``.

    ``room``: for their command lines.
    """
    real, launcher = subprocess.Popen, os.getpid()

    class Popen(real):  # type: ignore[type-arg,misc]
        def __new__(cls, command: Any, *_args: Any, **options: Any) -> Any:
            package = _package(command) if os.getpid() == launcher else None
            if package is None:
                return object.__new__(cls)
            pipes = {name: os.pipe() for name in ("stdin", "stdout") if options.get(name) == subprocess.PIPE}
            forked = _Forked(command, _fork(package, command, {**options, **pipes}, room))
            for name, (reads, writes) in pipes.items():
                ours, theirs = (writes, reads) if name == "stdin" else (reads, writes)
                os.close(theirs)
                setattr(forked, name, open(ours, "wb" if name == "stdin" else "rb"))  # noqa: SIM115 - as Popen's
            return forked

    class _Forked(real):  # type: ignore[type-arg,misc]
        """A process that is there already."""

        def __init__(self, command: Sequence[str], pid: int) -> None:
            self.args, self.pid, self.returncode = command, pid, None
            self.stdin = self.stdout = self.stderr = None
            self._child_created = True
            self._waitpid_lock = threading.Lock()

    return Popen


def _package(command: Any) -> str | None:
    """Which of ``PACKAGES`` the command starts."""
    if not isinstance(command, list) or command[:_PROGRAM] != [sys.executable, "-I", "-S", "-c"]:
        return None
    return next((package for package in PACKAGES if f"from {package}.__main__ import main" in command[_PROGRAM]), None)


def _fork(package: str, command: Sequence[str], options: Mapping[str, Any], room: process_title.Room | None) -> int:
    """The process id of the new one, which is all that it is to be, as after an exec."""
    assert options["start_new_session"]
    is_ready, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(lambda: _become(command, options, room, ready), package)
    os.close(ready)
    with open(is_ready, "rb") as told:
        told.read()
    return pid


def _run(become: Callable[[], None], package: str) -> NoReturn:
    """On top of the launcher's calls, which never go on here."""
    code = 1
    try:
        become()
        code = told(importlib.import_module(f"{package}.__main__").main())
    except SystemExit as end:
        code = told(end.code)
    except BaseException as error:  # noqa: BLE001 - what Python would tell of
        sys.excepthook(type(error), error, error.__traceback__)
    try:
        leave(code)
    finally:
        os._exit(1)


def _become(command: Sequence[str], options: Mapping[str, Any], room: process_title.Room | None, ready: int) -> None:
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
    kept = sorted({*options["pass_fds"], ready})
    for low, high in zip([2, *kept], [*kept, 1 + max(map(int, os.listdir("/proc/self/fd")))], strict=True):
        os.closerange(low + 1, high)
    for fd in options["pass_fds"]:
        os.set_inheritable(fd, True)
    _KEPT.extend([sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__])
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), line_buffering=True, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if options.get("env") is not None:
        environment = dict(options["env"])
        os.environ.clear()
        os.environ.update(environment)
    process_title.set_command_line(command, room=room)
    sys.orig_argv = [*command]
    sys.argv = ["-c", *command[_WORDS:]]
    os.close(ready)


_KEPT: list[Any] = []
"""The launcher's streams: one that is freed writes what it holds, as the launcher will, too."""
