"""A script that prints what it finds around itself, the same lines in every process that is like a fresh one."""

import atexit
import ctypes
import faulthandler
import gc
import importlib.util
import json
import locale
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time

FIRST = [name for name in sorted(globals()) if name.startswith("__")]
RANK = os.environ["RANK"]


def show(name, value):
    sys.stdout.write(f"{RANK} {name}: {value}\n")  # one write, of two ranks into one file


def twice(number):
    return 2 * number, __name__


def stream(name):
    s = getattr(sys, name)
    return (
        *(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.fileno(), s.newlines),
        *(type(s.buffer).__name__, s.buffer.mode, s.buffer.name, s is getattr(sys, f"__{name}__")),
    )


def status(field):
    with open("/proc/self/status") as file:
        return file.read().split(f"{field}:")[1].split()[0]


def main():
    show("argv", (sys.argv, sys.orig_argv[1:], sys.path[0], sys.flags, sys.warnoptions, sys._xoptions))
    show("path", sys.path[1:])
    show("main", (FIRST, __file__, __name__, __package__, __spec__, __doc__, __cached__, __annotations__))
    show("loader", (type(__loader__).__name__, __loader__.path, __loader__.name, type(__builtins__).__name__))
    for name in ("stdin", "stdout", "stderr"):
        show(name, stream(name))
    handled = [(int(n), str(signal.getsignal(n))) for n in signal.Signals if signal.getsignal(n) != signal.SIG_DFL]
    show("signals", (handled, signal.pthread_sigmask(signal.SIG_BLOCK, []), status("SigIgn"), status("SigBlk")))
    show("process", (os.getcwd(), os.getsid(0) == os.getpid() == os.getpgrp(), os.nice(0), os.sched_getaffinity(0)))
    show("limits", [resource.getrlimit(number) for number in range(16)])
    # not the shell's own, and not what only one of the two launchers sets
    names = sorted(name for name in os.environ if not name.startswith("FT_"))
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    show("environment", (names, [name for name in names if libc.getenv(name.encode()) is None]))
    show("threads", (len(os.listdir("/proc/self/task")), threading.active_count(), threading.current_thread().name))
    show("main thread", threading.main_thread() is threading.current_thread())
    show("native id", threading.get_native_id() == os.getpid())
    show("faulthandler", (faulthandler.is_enabled(), gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit()))
    show("hooks", (sys.excepthook, sys.displayhook, sys.gettrace(), hasattr(sys, "last_type"), hasattr(sys, "ps1")))
    show("locale", locale.setlocale(locale.LC_ALL))
    show("stdin data", sys.stdin.read())
    with open("/proc/self/comm") as comm, open("/proc/self/cmdline") as line:
        show("command", (comm.read(), line.read().rstrip("\0").split("\0")[1:]))
    show("spec", (importlib.util.find_spec("json").origin, sys.executable, sys.prefix, sys.dont_write_bytecode))
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            show(method, pool.map(twice, [1, 2, 3]))
    show("multiprocessing", (multiprocessing.current_process().name, multiprocessing.parent_process()))
    import numpy
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(range(4), batch_size=2, num_workers=2)
    show("loader", [batch.tolist() for batch in loader])
    show("torch", (torch.get_num_threads(), torch.cuda.is_initialized(), os.environ.get("OMP_NUM_THREADS")))
    with open(os.path.join(os.environ["SEEDS"], f"{RANK}.json"), "w") as file:
        json.dump([random.random(), torch.rand(1).item(), float(numpy.random.rand()), time.time()], file)
    wide = torch.ones(400, 400, requires_grad=True)
    (wide @ wide).sum().backward()
    show("backward", wide.grad.sum().item())
    atexit.register(show, "at exit", 1)
    atexit.register(show, "at exit", 2)
    threading.Thread(target=lambda: (time.sleep(0.1), show("thread", "ended"))).start()


if __name__ == "__main__":
    main()
