"""Everything that a program can find out about its own process, to compare a rank of ours with one of torchrun.

Run as a script by ``tests/e2e/test_harmless.py`` under both, in two cycles; started again by each rank, it is the
program that a rank starts. Each process writes what it finds to files in the directory of its first argument.
"""

from __future__ import annotations

import os
import random
import sys

random.seed(1234)
_FIRST_RANDOM = random.random()

import atexit  # noqa: E402 - the first draw comes before any other import
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import hashlib  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import multiprocessing  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from types import FunctionType, ModuleType  # noqa: E402
from typing import Any  # noqa: E402

STEPS, STEP_S = 100, 0.025
"""The watch of collectives looks about seven times a second, and at the main thread's place once."""
_PROC_STATUS = (
    "Name",
    "Umask",
    "NoNewPrivs",
    "Seccomp",
    "CapEff",
    "CapBnd",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "THP_enabled",
)
_TORCHS = ("anon_inode:[eventpoll]", "anon_inode:[io_uring]", "anon_inode:[eventfd]")
_GETTERS = {"PDEATHSIG": 2, "DUMPABLE": 3, "KEEPCAPS": 7, "TIMERSLACK": 30, "CHILD_SUBREAPER": 37}
"""Those of prctl that answer through a pointer, and those that return a number."""
_BY_POINTER = ("PDEATHSIG", "CHILD_SUBREAPER")


def digest(value: object) -> str:
    """Return a short name of a long state."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def name_of(value: object) -> str:
    """Return what a handler, a hook or a filter is, without its address."""
    return re.sub(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}", "", repr(value))


def state() -> Iterator[tuple[str, Any]]:
    """Yield name and value of everything that is looked at in any process."""
    yield "random", digest(random.getstate())
    yield from _interpreter()
    yield from _process()
    yield from _descriptors()
    yield from _logging_and_warnings()
    for name, value in os.environ.items():
        yield f"environ {name}", value
    if "numpy" in sys.modules:
        yield from _numpy(sys.modules["numpy"])
    if "torch" in sys.modules:
        yield from _torch(sys.modules["torch"])


def _interpreter() -> Iterator[tuple[str, Any]]:
    for number in signal.valid_signals():
        yield f"signal {number}", name_of(signal.getsignal(number))
    yield "signal mask", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    if threading.current_thread() is threading.main_thread():
        fd = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(fd)
        yield "signal wakeup", fd
    for name in ("unraisablehook", "displayhook", "breakpointhook"):
        yield f"sys.{name}", name_of(getattr(sys, name))
    for name, hook in (("sys.excepthook", sys.excepthook), ("threading.excepthook", threading.excepthook)):
        hooks: list[Any] = [hook]
        while hasattr(hooks[-1], "_previous"):  # ours calls the one that it found
            hooks.append(hooks[-1]._previous)
        yield name, [*map(name_of, hooks)]
    yield "gc", [gc.isenabled(), gc.get_threshold(), gc.get_debug(), [*map(name_of, gc.callbacks)]]
    yield "gc frozen", gc.get_freeze_count() > 0
    yield "flags", [str(sys.flags), sys.warnoptions, sys._xoptions, sys.dont_write_bytecode, sys.pycache_prefix]
    yield "sys.argv", [sys.argv, sys.orig_argv[1:]]
    yield "sys.path", sys.path
    yield "sys.path_hooks", [*map(name_of, sys.path_hooks)]
    yield "sys.meta_path", [name_of(each) for each in sys.meta_path]
    yield "sitecustomize", [name for name in ("sitecustomize", "usercustomize") if name in sys.modules]
    main: Any = sys.modules["__main__"]
    loader = [type(main.__loader__).__name__, type(main.__builtins__).__name__]
    yield "__main__", [sorted(n for n in vars(main) if n.startswith("__")), name_of(main.__spec__), *loader]
    yield "faulthandler", faulthandler.is_enabled()
    for name in ("stdin", "stdout", "stderr"):
        yield f"sys.{name}", _stream(name)
    yield "replaced", replaced()
    yield "threads", sorted(each.name for each in threading.enumerate())
    yield "threads at exit", sorted(each.name for each in threading.enumerate() if not each.daemon)
    native = threading.current_thread().native_id == threading.get_native_id()
    yield "main thread", [native, threading.main_thread().native_id == os.getpid()]


def replaced() -> list[str]:
    """Return where a module or class of others holds a function or an object of this package."""
    found = []
    for module_name, module in [*sys.modules.items()]:
        if module_name.startswith(("megatron_ft", "tests", "__main__")) or not isinstance(module, ModuleType):
            continue
        for name, value in [*vars(module).items()]:
            # by its type: to ask some objects of torch for their class calls code of theirs
            is_class = issubclass(type(value), type) and value.__module__ == module_name
            members = [*vars(value).items()] if is_class else []
            for path, each in [(name, value), *((f"{name}.{member}", what) for member, what in members)]:
                if _is_ours(each):
                    found.append(f"{module_name}.{path}")
    return sorted(found)


def _is_ours(value: object) -> bool:
    if type(value) in (staticmethod, classmethod):
        value = value.__func__  # type: ignore[attr-defined]
    if type(value) is FunctionType:
        return f"{os.sep}megatron_ft{os.sep}" in value.__code__.co_filename
    return str(type(value).__module__).startswith("megatron_ft")


def _stream(name: str) -> list[Any]:
    stream: Any = getattr(sys, name)
    facts = [stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through]
    if multiprocessing.parent_process() is None:  # in a worker the input is a new descriptor
        facts += [stream.name, stream.fileno()]
    more = [stream.isatty(), stream.newlines, type(stream).__name__, type(stream.buffer).__name__, stream.buffer.mode]
    return [*facts, *more, stream is getattr(sys, f"__{name}__")]


def _process() -> Iterator[tuple[str, Any]]:
    umask = os.umask(0)
    os.umask(umask)
    yield "umask", umask
    for name in sorted(name for name in dir(resource) if name.startswith("RLIMIT_")):
        yield name, resource.getrlimit(getattr(resource, name))
    yield "cwd", os.getcwd()
    yield "oom_score_adj", Path("/proc/self/oom_score_adj").read_text()
    text = Path("/proc/self/status").read_text()
    for name in _PROC_STATUS:
        yield f"status {name}", re.findall(rf"^{name}:\s*(.*)$", text, re.MULTILINE)
    line = Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0")
    yield "command", [Path("/proc/self/comm").read_text(), line[1:]]
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    yield "environ of libc", [name for name in os.environ if libc.getenv(name.encode()) is None]
    for name, number in _GETTERS.items():
        answer = ctypes.c_int(0)
        returned = libc.prctl(number, ctypes.byref(answer), 0, 0, 0)
        yield f"prctl {name}", answer.value if name in _BY_POINTER else returned
    yield "session", [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()]
    children = [Path(path, "children").read_text() for path in Path("/proc/self/task").iterdir()]
    yield "children", len("".join(children).split())
    with contextlib.suppress(ChildProcessError):
        yield "to be reaped", os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _descriptors() -> Iterator[tuple[str, Any]]:
    """Yield the descriptors that aren't torch's, and what kinds a child would inherit."""
    kinds, inherited = set(), set()
    for fd in sorted(int(entry) for entry in os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing
            to = re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{fd}"))
            if to == "socket":
                with socket.socket(fileno=os.dup(fd)) as found:
                    to = f"socket of {found.family.name}"
            if to not in ("pipe", "socket of AF_INET", "socket of AF_INET6", *_TORCHS):
                kinds.add(to)
            if os.get_inheritable(fd):
                inherited.add(to)
    yield "descriptors", sorted(kinds)
    yield "inheritable descriptors", sorted(inherited)


def _logging_and_warnings() -> Iterator[tuple[str, Any]]:
    root = logging.getLogger()
    yield "root logger", [root.level, [*map(name_of, root.handlers)], [*map(name_of, root.filters)], root.disabled]
    manager = root.manager
    factories = [logging.getLoggerClass(), logging.getLogRecordFactory(), logging.lastResort, manager.disable]
    yield "logging", [*map(name_of, factories), logging.raiseExceptions]
    for name, logger in sorted(manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (logger.level or logger.handlers or logger.disabled):
            yield f"logger {name}", [logger.level, [*map(name_of, logger.handlers)], logger.propagate, logger.disabled]
    yield (
        "warnings",
        [[*map(name_of, warnings.filters)], name_of(warnings.showwarning), name_of(warnings.formatwarning)],
    )


def _numpy(numpy: Any) -> Iterator[tuple[str, Any]]:
    yield "numpy random", digest(numpy.random.get_state())


def _torch(torch: Any) -> Iterator[tuple[str, Any]]:
    yield "torch random", [digest(torch.get_rng_state().tolist()), torch.initial_seed()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "cuda random", [digest(each.tolist()) for each in torch.cuda.get_rng_state_all()]
        yield "cuda", [torch.cuda.current_device(), torch.cuda.memory_allocated(), torch.cuda.get_allocator_backend()]
    yield "cuda is initialised", torch.cuda.is_initialized()
    yield "torch threads", [torch.get_num_threads(), torch.get_num_interop_threads()]
    yield "torch defaults", [*map(str, (torch.get_default_dtype(), torch.get_default_device()))]
    yield "autograd", [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()]
    dist = torch.distributed
    if dist.is_initialized():
        world = dist.distributed_c10d._world
        groups = [[dist.get_backend(group), dist.get_process_group_ranks(group)] for group in world.pg_map]
        yield "process groups", groups
        # any collective of ours would have a number, too
        yield "collectives", dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
        yield "debug level", str(dist.get_debug_level())
    yield "init_process_group", str(inspect.signature(dist.init_process_group))


def write(moment: str) -> None:
    """Write what is found now to a file of this moment, cycle and rank."""
    where = f"{moment}.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}.json"
    Path(sys.argv[1], where).write_text(json.dumps(dict(state())))


class _LookInWorker:
    """A data set whose first item is looked up in a worker of a DataLoader, a fork of the rank."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index == 0:
            write("worker")
        return index


def twice(number: int) -> list[Any]:
    """Return something that shows which module this is in another process."""
    return [2 * number, __name__]


def _rank(hooks: bool) -> None:
    atexit.register(write, "exit")
    write("begin")
    import numpy
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    write("unseeded")
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    on_step = _hooks() if hooks else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draws = [_FIRST_RANDOM]
    for step in range(STEPS):
        if on_step is not None:
            on_step(step, torch.ones(4))
        draws += [random.random(), float(numpy.random.rand()), torch.rand(1, device=device).item()]
        dist.all_reduce(torch.ones(4))
        time.sleep(STEP_S)
    write("training")
    again, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    Path(sys.argv[1], f"draws.{again}.{rank}.json").write_text(json.dumps({"draws": draws}))
    list(DataLoader(_LookInWorker(), num_workers=1))  # type: ignore[arg-type]
    subprocess.run([sys.executable, __file__, sys.argv[1], "child"], check=True)
    if again == "1":
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                Path(sys.argv[1], f"{method}.{again}.{rank}.json").write_text(
                    json.dumps({"pool": pool.map(twice, [1, 2])})
                )
    dist.barrier()
    if again == "0":
        if rank == "1":
            sys.exit(3)
        time.sleep(60)
    dist.destroy_process_group()


def _hooks() -> Callable[[int, Any], None]:
    from megatron_ft import fault_tolerance as ft
    from megatron_ft import memory_checkpoint

    state = ft.GlobalState.create(save=sys.argv[1], ft=ft.FaultToleranceSettings(calc_ft_timeouts=True))
    ft.setup(state.cfg, state)
    ft.maybe_setup_simulated_fault(state.cfg.ft)

    def on_step(step: int, tensor: Any) -> None:
        ft.on_training_step_start(state)
        if step % 10 == 0:
            memory_checkpoint.save(step, {"tensor": tensor, "step": step})
        ft.on_training_step_end(state)

    return on_step


if __name__ == "__main__":
    if sys.argv[2:] == ["child"]:
        write("child")
    else:
        _rank("FT_SIM_FAULT_DESC" in os.environ)
