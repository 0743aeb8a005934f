"""Faults for tests and campaigns, beside those of the package: ways to hang, to crash, and a full disk."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import signal
import sys
import time
from typing import Any, NoReturn

from megatron_ft.core import fault_plan
from megatron_ft.core.errors import ConfigError
from megatron_ft.rank.base import agreement
from megatron_ft.rank.faults import acts, injection

EXIT_CODE = 3
TYPES = {
    "sleep": "sleeps for ever",
    "spin": "spins for ever",
    "gil": "waits for ever in C and holds the GIL",
    "stuck_collective": "enters barriers that no other rank enters",
    "exit": f"exits with code {EXIT_CODE}",
    "segfault": "has a segmentation fault",
    "sigterm": "gets SIGTERM",
    "disk_full": "finds the disk of its checkpoints full",
}
_MUTEX_BYTES = 128  # more than a pthread_mutex_t has anywhere; zeros are an unlocked one on Linux


def install(*, save_dir: str = ".") -> None:
    """Let fault plans of this process name them; nothing can be written under ``save_dir`` after ``disk_full``."""
    fault_plan.FAULT_TYPES.update(TYPES)
    injection.inject = functools.partial(inject, save_dir=save_dir)  # type: ignore[assignment]


def inject(fault_type: str, *, exit_code: int = EXIT_CODE, save_dir: str = ".", **details: Any) -> None:
    """Do one fault to this process, now, as ``acts.inject`` does those of the package."""
    sys.stdout.flush()
    sys.stderr.flush()
    match fault_type:
        case "sleep":
            _sleep()
        case "spin":
            _spin()
        case "gil":
            _hold_the_gil()
        case "stuck_collective":
            _stick_in_a_collective()
        case "exit":
            os._exit(exit_code)
        case "segfault":
            _segfault()
        case "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        case "disk_full":
            _fill_the_disk(save_dir)
        case _:
            acts.inject(fault_type, **details)


def _sleep() -> NoReturn:
    while True:
        time.sleep(3600.0)


def _spin() -> NoReturn:
    while True:
        pass


def _hold_the_gil() -> None:
    """Lock a mutex twice, in a C function that is called with the GIL held: the deadlock that extensions have.

    Nothing in Python runs any more in any thread, signal handlers included, and no signal ends the wait.
    """
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    lock(mutex)
    lock(mutex)


def _stick_in_a_collective() -> NoReturn:
    """Enter a barrier as only one rank does whose code took another branch; then all ranks wait.

    A backend may pair it with what the others do next (NCCL has no names for its operations): then the next one.
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
    """From now on nothing can be written under ``save_dir``: by this process, and by those that it forks.

    No byte of the real disk is taken. What fails is opening a file there to write, with ENOSPC, and
    ``torch.save`` to a path there, which writes in C++ and gets to write to /dev/full. What is open already,
    and fresh interpreters (multiprocessing's "spawn"), aren't hit.
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
