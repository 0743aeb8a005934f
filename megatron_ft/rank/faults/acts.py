"""The faults themselves: what a process does to itself in a rehearsal."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
import time
from typing import Any, NoReturn

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.fault_plan import DEFAULT_SLOWER_BY_S
from megatron_ft.rank.base import agreement

_SIGNALS = {"rank_killed": signal.SIGKILL, "rank_hung": signal.SIGSTOP, "sigterm": signal.SIGTERM}
_MUTEX_BYTES = 128  # larger than any pthread_mutex_t; zeros are an unlocked mutex on Linux


class InjectedFault(RuntimeError):
    """Raised by a fault of type ``exception``."""


class Slowness:
    """Seconds by which each step of this process is slowed down: 0 until a fault of type ``slow``."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_step(self) -> None:
        if self.seconds:
            time.sleep(self.seconds)


def announce(what: str) -> None:
    """Print on stderr, beforehand, that this fault is simulated."""
    print(f"FT: SIMULATED FAULT: {what}", file=sys.stderr, flush=True)


def inject(
    fault_type: str,
    *,
    exit_code: int = 1,
    seconds: float = DEFAULT_SLOWER_BY_S,
    save_dir: str | None = None,
    slowness: Slowness | None = None,
) -> None:
    """Inject one fault of :data:`megatron_ft.core.fault_plan.FAULT_TYPES` into this process, now.

    Returns after ``slow``, ``disk_full``, a ``sigterm`` that the process handles, and ``rank_hung`` once the process
    has been continued. Faults of ``IN_LOOP_TYPES`` are for the training thread.

    Args:
        fault_type: type of the fault.
        exit_code: for ``exit``.
        seconds: for ``slow``: seconds added to each step.
        save_dir: for ``disk_full``: directory in which writes fail.
        slowness: for ``slow``: object whose ``on_step`` is called in each step.

    Raises:
        InjectedFault: for ``exception``.
        ConfigError: ``stuck_collective`` without a process group, ``disk_full`` without a directory.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if fault_type in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault_type])
        return
    match fault_type:
        case "sleep":
            _sleep()
        case "spin":
            _spin()
        case "gil":
            _hold_the_gil()
        case "stuck_collective":
            _stick_in_a_collective()
        case "slow":
            assert slowness is not None
            slowness.seconds = seconds
        case "exception":
            raise InjectedFault("simulated fault")
        case "exit":
            os._exit(exit_code)
        case "segfault":
            _segfault()
        case "disk_full":
            if save_dir is None:
                raise ConfigError("a fault of type 'disk_full' needs a save directory")
            _fill_the_disk(save_dir)
        case _:
            raise AssertionError(fault_type)


def _sleep() -> NoReturn:
    while True:
        time.sleep(3600.0)


def _spin() -> NoReturn:
    while True:
        pass


def _hold_the_gil() -> None:
    """Lock a mutex twice in a C function called with the GIL held: a deadlock as extensions have it.

    No Python code runs any more in any thread, signal handlers included, and no signal ends the wait.
    """
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    lock(mutex)
    lock(mutex)


def _stick_in_a_collective() -> NoReturn:
    """Enter a barrier on this rank only, as after a divergent branch; then all ranks wait.

    A backend may pair the barrier with the next operation of the others (NCCL has no names for its operations), so it
    is repeated.
    """
    if not agreement.has_process_group():
        raise ConfigError("a fault of type 'stuck_collective' needs a process group")
    import torch.distributed as dist

    while True:
        dist.barrier()


def _segfault() -> None:
    # a core dump of an injected fault is of no use
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(0)


def _fill_the_disk(save_dir: str) -> None:
    """Make every write under ``save_dir`` fail, for this process and processes that it forks.

    The real disk isn't filled. Opening a file there to write fails with ENOSPC; ``torch.save`` to a path there, which
    writes in C++, writes to /dev/full instead. Open files and fresh interpreters (multiprocessing's "spawn") aren't
    affected.
    """
    directory = os.path.realpath(save_dir)
    writing = os.O_WRONLY | os.O_RDWR

    def is_inside(path: object) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # a file descriptor
        return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(directory + os.sep)

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & writing and is_inside(args[0]):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (simulated)", os.fsdecode(args[0]))

    sys.addaudithook(on_event)
    torch = sys.modules.get("torch")
    if torch is not None:
        _redirect_torch_save(torch, is_inside)


def _redirect_torch_save(torch: Any, is_inside: Any) -> None:
    writer = torch._C.PyTorchFileWriter

    def open_writer(target: Any, *args: Any, **kwargs: Any) -> Any:
        return writer("/dev/full" if is_inside(target) else target, *args, **kwargs)

    torch._C.PyTorchFileWriter = open_writer
