"""``ft_launcher``: torchrun that detects hung and failed ranks, reports which and why, and restarts fast."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from megatron_ft.errors import ConfigError
from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.launcher.base import launcher_lines, output_copying
from megatron_ft.launcher.base.rank_environment import find_script, why_fresh
from megatron_ft.link.linux.process_setup import become_subreaper
from megatron_ft.link.log import LAUNCHER, LEVEL_VARIABLE
from megatron_ft.link.reactor import THREAD_PREFIX
from megatron_ft.link.resolver import ask_again_soon
from megatron_ft.link.standard_error import put
from megatron_ft.run_ahead.forking_spawner import ServerProcess

if TYPE_CHECKING:
    from megatron_ft.launcher.outcome import LauncherEnd

_LONGEST_EXIT_S = 10.0
"""Longer than any exit function of this package may wait for a file server, or for a reader of the output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Launch, and return the exit code.

    Without ``argv`` this is the command ``ft_launcher``, which ends the process instead of returning. With ``argv`` it
    keeps the promise of torchrun's ``main``: a job that has failed raises.

    0: all ranks ended with 0. 1: the job failed for good, or was asked to stop and not all ranks then ended
    with 0 in time. 2: a mistake of the user; no rank was started. 93: cycle after cycle
    got no further. 94: too few nodes to go on from here; the job may be started again. 130: stopped by SIGINT (Ctrl-C).

    Raises:
        ConfigError: ``argv`` has a mistake, no rank was started. It is a ValueError.
        ChildFailedError: ranks have failed, and no restart is left.
        Exception: whatever else has failed the launcher, as it was raised.
    """
    if argv is None:
        # a missing standard stream (as under a daemon) is opened, for the first opened files would take its number
        while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(fd, True)
        os.close(fd)
        ask_again_soon()
        _leave(run_command())
    with _ending_at_once_on_interrupt():
        end = _run(argv, None)
    if end.code and end.error is not None:
        raise end.error
    if any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate()):
        _leave(end.code)
    return end.code


def run_command(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the command, having said on standard error what went wrong.

    Without ``argv`` the arguments are the process's own, and ranks may be forked.
    """
    with _ending_at_once_on_interrupt():
        server = None if argv is not None else _start_fork_server(sys.argv[1:])
        try:
            return _run(argv, server).code
        except ConfigError as error:
            put(launcher_lines.user_mistake(str(error)))
            return _failed(f"mistake: {error}", server, MISTAKE_CODE)
        except OSError as error:
            return _cannot_start(error, server)


def _start_fork_server(argv: Sequence[str]) -> ServerProcess | None:
    """Start the fork server now: it and this process import torch at the same time."""
    orders = find_script(argv, os.environ)
    if orders is None or why_fresh(orders.command) is not None:
        return None
    if orders.command[2] != "-m" and not os.path.exists(orders.command[2]):
        return None
    become_subreaper()  # orphans of imported modules become children of this process
    try:
        return ServerProcess(orders)
    except OSError:
        return None  # tried again, and reported, once there is a log


def _cannot_start(error: OSError, server: ServerProcess | None, *, has_others: bool = False) -> int:
    """Report what the launcher can't get before the job begins: files, processes, memory. Return the exit code."""
    text = launcher_lines.cannot_start(error)
    launcher_lines.make_printer(has_others=has_others)(text)
    return _failed(f"failed: {text}", server)


def _failed(reason: str, server: ServerProcess | None, code: int = 1) -> int:
    """Clean up after a reported mistake, or failure of the launcher itself. Return the exit code."""
    with contextlib.suppress(OSError, ImportError):  # imports need files, too
        from megatron_ft.launcher.schedulers import kubernetes, schedulers

        if schedulers.detect(os.environ).are_pods:
            kubernetes.write_reason(reason)
    if server is not None and not server.is_gone:  # the job may have begun, and ended it
        with contextlib.suppress(OSError):  # it is killed first; its children may be left
            server.end(set)
    return code


def _leave(code: int) -> NoReturn:
    """Exit as Python does, but without finalizing the interpreter and torch.

    A thread of the launcher may wait inside torch for a node that doesn't answer; if one returns while Python is
    finalized, C++ ends the process by SIGABRT, and the exit code of a successful job is lost.
    """
    # otherwise torch's threads, which copy the ranks' output, wait for a file server
    if output_copying.ENDS.wait(output_copying.LAST_COPY_S):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that aren't daemons, as Python would

    # if the output isn't read, a thread may hold a stream for good that these functions, or we, would flush
    def run_exit_functions() -> None:
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed when Python started
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    last = threading.Thread(target=run_exit_functions, daemon=True)
    last.start()
    last.join(_LONGEST_EXIT_S)
    os._exit(code)


@contextlib.contextmanager
def _ending_at_once_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C just end the process until the node takes the signals: nothing needs cleanup yet.

    A KeyboardInterrupt during the import of torch would end in whatever torch makes of it. For process 1 of a container
    the kernel drops a SIGTERM without a handler, so SIGTERM is handled there, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    numbers = [signal.SIGINT, signal.SIGTERM] if os.getpid() == 1 else [signal.SIGINT]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


def _run(argv: Sequence[str] | None, server: ServerProcess | None) -> LauncherEnd:
    began_s = time.monotonic()
    from megatron_ft.launcher import arguments, dry_run, job, outcome  # torch takes a second to import
    from megatron_ft.launcher.base.given_flags import given_flags

    words = sys.argv[1:] if argv is None else argv
    flags, _ = given_flags(words)
    try:
        line = replace(arguments.parse(words), began_s=began_s)
    except ConfigError as error:
        if dry_run.is_asked(flags):
            return outcome.LauncherEnd(dry_run.show_mistakes(flags, error))
        raise
    if line.options.dry_run:
        return outcome.LauncherEnd(dry_run.show(line, flags))
    config = line.options
    if config.is_set("log_level"):
        LAUNCHER.set_level(config.log_level)
        os.environ[LEVEL_VARIABLE] = str(config.log_level)
    try:
        return job.launch(line, server, lambda reason: _failed(reason, server))
    except OSError as error:
        return outcome.LauncherEnd(_cannot_start(error, server, has_others=line.max_nodes > 1), error=error)


if __name__ == "__main__":
    sys.exit(main())
