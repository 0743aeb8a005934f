"""A forked process becomes a rank: with streams, environment and ``__main__`` as a fresh ``python -u`` has them."""

from __future__ import annotations

import builtins
import contextlib
import io
import locale
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from typing import Any, NamedTuple, NoReturn

from megatron_ft.core.preload import RankCommand
from megatron_ft.ipc.prctl import die_with_parent
from megatron_ft.rank.error_file import write_error_file
from megatron_ft.rank.import_recorder import ImportRecorder
from megatron_ft.rank.process_title import set_command_line
from megatron_ft.rank.user_code import note_user_code

__all__ = ["Interrupts", "NewRank", "become", "put_first_in_path", "remember_first_in_path", "run"]

_ERRORS = ("strict", "strict", "backslashreplace")

_first_in_path: list[str] = []
_kept: list[Any] = []
"""What the process had before and can't do without, though nothing refers to it any more."""


class Interrupts(NamedTuple):
    """How a fresh interpreter would take them here: the handler of SIGINT, and the signals that are blocked."""

    handler: Any
    blocked: frozenset[int]


class NewRank(NamedTuple):
    """What a forked process is to become. Descriptors are its own."""

    argv: list[str]
    command: RankCommand
    cwd: str | None
    env: dict[str, str]
    go_fd: int
    """Readable when the launcher knows this process; at its end when it doesn't want it any more."""
    streams: tuple[int, int, int]
    report_fd: int | None
    launcher_pid: int
    interrupts: Interrupts


def become(rank: NewRank) -> None:
    """Take on the rank's identity, as soon as the launcher is its parent and says so."""
    os.setsid()
    for target, fd in enumerate(rank.streams):
        os.dup2(fd, target)
    if not os.read(rank.go_fd, 1):
        os._exit(1)  # the launcher has given this one up
    die_with_parent()
    # the launcher may have died before the kernel was asked
    if os.getppid() != rank.launcher_pid:
        os._exit(1)
    _close_all_but(set() if rank.report_fd is None else {rank.report_fd})
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, rank.interrupts.handler)
    with contextlib.suppress(OSError):  # it is gone, or was entered with other rights: as the launcher, we are there
        if rank.cwd is not None and os.getcwd() != rank.cwd:
            os.chdir(rank.cwd)
    _take_environment(rank.env)
    _open_streams()
    _differ_from_siblings()
    sys.orig_argv = list(rank.argv)
    set_command_line(rank.argv)
    if rank.report_fd is not None:
        ImportRecorder(rank.report_fd).install()


def run(rank: NewRank) -> NoReturn:
    """Run the script or module as ``__main__``, to the end of the process.

    Raises:
        SystemExit: when it has ended, for Python's own way out: atexit, threads, streams.
    """
    command = rank.command
    note_user_code()
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __cached__=None)
    _kept.append(sys.modules.get("__main__"))
    sys.modules["__main__"] = main
    error: BaseException | None = None
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, rank.interrupts.blocked)  # an interrupt that has waited comes now
        if command.is_module:
            _run_module(command, main)
        else:
            _run_script(command, main)
    except SystemExit:
        raise
    except BaseException as raised:  # noqa: BLE001 - whatever a script raises ends its process, as Python would do it
        error = raised
    # outside of the handler: an excepthook finds no exception being handled
    if error is not None:
        _end_by(error)
    raise SystemExit(0)


def _run_script(command: RankCommand, main: types.ModuleType) -> None:
    path = os.path.abspath(command.script)
    sys.argv = [command.script, *command.arguments]
    put_first_in_path(os.path.dirname(os.path.realpath(path)))
    main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        # as Python says it, with its exit code
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {os.strerror(error.errno or 0)}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(command: RankCommand, main: types.ModuleType) -> None:
    sys.argv = ["-m", *command.arguments]
    put_first_in_path(os.getcwd())
    runpy._run_module_as_main(command.script)  # type: ignore[attr-defined]  # what `python -m` calls


def remember_first_in_path() -> None:
    """The entry of ``sys.path`` that stands for the script's directory; imports may put others before it."""
    _first_in_path[:] = sys.path[:1]


def put_first_in_path(directory: str) -> None:
    """Let that entry stand for this directory."""
    if getattr(sys.flags, "safe_path", False):
        return
    known = bool(_first_in_path) and _first_in_path[0] in sys.path
    sys.path[sys.path.index(_first_in_path[0]) if known else 0] = directory
    _first_in_path[:] = [directory]


def _end_by(error: BaseException) -> NoReturn:
    """End as Python ends of an exception that nobody caught."""
    told = _of_the_script(error)
    sys.last_type, sys.last_value, sys.last_traceback = told
    write_error_file(*told)
    in_hook: BaseException | None = None
    try:
        sys.excepthook(*told)
    except SystemExit:
        raise
    except BaseException as raised:  # noqa: BLE001 - a hook may raise anything; Python tells of both
        in_hook = raised
    if in_hook is not None:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(*_of_the_script(in_hook))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(*told)
    if isinstance(error, KeyboardInterrupt):
        _end_by_interrupt()
    raise SystemExit(1)


def _of_the_script(error: BaseException) -> tuple[type[BaseException], BaseException, types.TracebackType | None]:
    """An exception without the frames of this module."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") == __name__:
        traceback = traceback.tb_next
    return type(error), error.with_traceback(traceback), traceback


def _end_by_interrupt() -> NoReturn:
    """After its way out Python lets the signal end the process, so that a shell knows."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)


def _take_environment(env: Mapping[str, str]) -> None:
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _close_all_but(keep: set[int]) -> None:
    """Only the standard streams and these stay, as after an exec."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass  # the one that listed them


def _open_streams() -> None:
    """As ``python -u`` opens them: what is written goes out at once. They stay open as long as the process lives."""
    old: list[Any] = [sys.__stdin__, sys.__stdout__, sys.__stderr__]
    _kept.extend((*old, sys.stdin, sys.stdout, sys.stderr))
    for fd, (name, before) in enumerate(zip(("stdin", "stdout", "stderr"), old, strict=True)):
        buffering = -1 if fd == 0 else 0
        buffer: Any = open(fd, "rb" if fd == 0 else "wb", buffering, closefd=False)  # noqa: SIM115
        (buffer.raw if fd == 0 else buffer).name = f"<{name}>"
        stream: Any = io.TextIOWrapper(
            buffer,
            encoding=locale.getpreferredencoding(False) if before is None else before.encoding,
            errors=_ERRORS[fd] if before is None else before.errors,
            newline="\n",
            write_through=True,
        )
        stream.mode = "r" if fd == 0 else "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _differ_from_siblings() -> None:
    """Fresh interpreters draw their own seeds; a fork has its parent's. (``random`` reseeds itself.)"""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
