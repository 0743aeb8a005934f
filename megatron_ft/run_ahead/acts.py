"""Acts of an import that ranks can't share: seen by audit events, by stand-ins, and by what is left afterwards.

An act is told before it is done where an event or a stand-in sees it; threads, files and memory of C libraries are
found after the import. One table lists the acts that are known to be harmless, each with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import pathlib
import random
import re
import stat
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from megatron_ft.link.base.rank_variables import tells_ranks_apart
from megatron_ft.link.linux.processes import thread_count
from megatron_ft.rank.base.replacing import ImportHook, left_out_of_stacks

_THREAD, _PROCESS, _LISTENS = "starts a thread", "starts a process", "listens"
_WRITES, _TEMPORARY, _CHANGES = "writes a file", "makes a temporary file", "changes files"
_DRAWS, _SEEDS, _ALL = "draws random numbers", "seeds a generator from the system", "reads all of os.environ"

_EVENTS = {
    _THREAD: "_thread.start_new_thread _thread.start_joinable_thread",
    _PROCESS: "subprocess.Popen os.system os.posix_spawn os.spawn os.fork os.forkpty os.exec",
    _TEMPORARY: "tempfile.mkstemp tempfile.mkdtemp",
    _LISTENS: "socket.bind",
    _CHANGES: "os.mkdir os.remove os.rename os.rmdir os.link os.symlink os.truncate shutil.rmtree shutil.move",
    _WRITES: "sqlite3.connect shutil.copyfile",
    "uses a network connection": "socket.connect socket.sendto socket.sendmsg",
    "locks a file": "fcntl.flock fcntl.lockf",
    "reads standard input": "builtins.input",
    "sends a signal": "os.kill os.killpg signal.pthread_kill",
}
_INSTALLED = "*"
"""Any module of an installed package."""
_HARMLESS = (
    # act, modules that do it (packages, or functions of modules), why ranks may share it
    (_DRAWS, "multiprocessing.process multiprocess.process", "keys that only processes of a rank among each other use"),
    (_DRAWS, "numpy.random", "the first seed of the global generator, which each rank seeds anew"),
    (_DRAWS, "tempfile", "a generator of names, which is made anew in each process"),
    (_DRAWS, "torch._dynamo torch._inductor torch.fx", "names in generated code, unique within a process"),
    (_DRAWS, "torch.distributed._composable.contract sympy", "names of symbols, unique within a process"),
    (_DRAWS, "transformers.utils.hub", "an id in requests to a server that only counts them"),
    (_DRAWS, "scipy.stats._distribution_infrastructure", "numbers in the examples of documentation"),
    (_SEEDS, f"{_INSTALLED} tempfile", "each rank seeds it anew"),
    (_WRITES, "tempfile._get_default_tempdir filelock._strict", "a test of the file system, removed at once"),
    (_CHANGES, "tempfile._get_default_tempdir", "a test of the file system, removed at once"),
    (_TEMPORARY, "filelock._strict ctypes.util", "a test whether links work, or output of gcc, removed at once"),
    (_TEMPORARY, "torch._dynamo", "a directory whose name a rank reads only to debug"),
    (_CHANGES, _INSTALLED, "directories for caches, and files in them, are the same for all ranks"),
    (_PROCESS, _INSTALLED, "a question about the machine: the package waits for the answer, or a child is found later"),
    (_PROCESS, "ctypes.util platform uuid megatron.core.package_info", "gcc, uname, ip, git: asked for facts"),
    (_LISTENS, "urllib3.util.connection", "a test whether there is IPv6, closed at once"),
    (
        _ALL,
        "tqdm networkx fsspec numba dask megatron.core.ssm.ops.common.determinism",
        "those of an own prefix are kept",
    ),
    (_ALL, "subprocess ctypes.util", "the environment of a program, whose start is an act of its own"),
    (_ALL, "urllib.request", "it keeps proxies"),
)
CUDA = "initialises CUDA"
_SERVER = "megatron_ft.run_ahead.server"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_IN_PACKAGES = re.compile("/(site|dist)-packages/")
_IMPORT = "<frozen importlib"
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SHARED_MEMORY = re.compile(r"^(\S+) .w.s \S+ \S+ \S+ *(.*)$", re.MULTILINE)
_HARMLESS_DEVICES = re.compile(r" /dev/(null|zero|full|u?random|nvidiactl|nvidia\d+) open$")
"""The last two: the driver's library that counts devices keeps them open; a process with CUDA also has nvidia-uvm."""
_handlers: dict[str, Callable[..., None]] = {}
"""Handlers by audit event; empty while nothing is watched."""


class _Hook:
    """The audit hook. It can't be removed: in ranks it is a function of C that does nothing, and is in no stack."""

    __call__: Any = staticmethod(operator.is_)


def _audit(_hook: object, event: str, arguments: Any) -> None:
    handler = _handlers.get(event)
    # Python's import opens modules, and writes and lists its caches of them
    if handler is not None and not sys._getframe(1).f_code.co_filename.startswith(_IMPORT):
        handler(*arguments)


class Watch:
    """Calls ``on_act`` with an act and the module that does it, while modules are imported within the block."""

    def __init__(self, on_act: Callable[[str, str], None]) -> None:
        self._on_act = on_act
        self.files: dict[str, tuple[int, ...] | None] = {}
        """Files of the user that were read, and their state at that time."""
        self._undo: list[tuple[Any, str, Any]] = []
        self._states: dict[str, Any] = {}
        """States of the generators of Python and numpy."""
        self._numpy = ImportHook("numpy.random", lambda _: self._states.update(_generators()))
        self._seeded: weakref.WeakSet[random.Random] = weakref.WeakSet()
        """Other generators, seeded from the system."""
        self._own = _held()
        sys.addaudithook(_Hook())

    def __enter__(self) -> Watch:
        _Hook.__call__ = _audit  # type: ignore[method-assign]
        for what, events in _EVENTS.items():
            _handlers.update(dict.fromkeys(events.split(), functools.partial(self._act, what)))
        _handlers["open"] = self._opens
        _handlers["os.listdir"] = _handlers["os.scandir"] = functools.partial(self._looks, True)
        shared = {*os.environ._data}  # type: ignore[attr-defined]  # the same in all ranks, whatever their names are
        for environ in (os.environ, os.environb):  # whose every use encodes the name first
            self._tell_before(environ, "encodekey", functools.partial(self._reads, shared))
        self._tell_before(type(os.environ), "__iter__", functools.partial(self._act, _ALL))
        self._tell_before(threading.Thread, "start", functools.partial(self._act, _THREAD))  # Python 3.11 has no event
        for owner, name in ((os, "urandom"), (os, "getrandom"), (random, "_urandom")):
            self._tell_before(owner, name, functools.partial(self._act, _DRAWS))
        self._tell_before(random.Random, "seed", self._seeds)
        for module, name in ((os.path, "exists"), (os.path, "isfile"), (os.path, "isdir"), (pathlib.Path, "stat")):
            self._tell_before(module, name, functools.partial(self._looks, False))
        self._states = _generators()
        self._numpy.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        stand_ins = {id(getattr(owner, name)): original for owner, name, original in self._undo}
        self.end()
        for module in list(sys.modules.values()):  # some have taken a function: from os import urandom
            for name, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
                if id(value) in stand_ins:
                    setattr(module, name, stand_ins[id(value)])

    def end(self) -> None:
        """Undo everything but the hook."""
        _handlers.clear()
        self._numpy.end()
        _Hook.__call__ = staticmethod(operator.is_)  # type: ignore[method-assign]
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)

    def _tell_before(self, owner: Any, name: str, tell: Callable[..., None]) -> None:
        """Have ``tell`` called before a function; a module that keeps the stand-in has the original afterwards."""
        original = getattr(owner, name)

        @functools.wraps(original)
        @left_out_of_stacks
        def stand_in(*arguments: Any, **named: Any) -> Any:
            if _handlers:
                tell(*arguments, **named)
            return original(*arguments, **named)

        self._undo.append((owner, name, original))
        setattr(owner, name, stand_in)

    # -- acts ---------------------------------------------------------------------------------------------

    def _act(self, what: str, *_arguments: object) -> None:
        """Report an act, unless the table says that it is harmless."""
        actor, names, is_package = _actor()
        harmless = {who for act, modules, _reason in _HARMLESS if act == what for who in modules.split()}
        if not actor or (is_package and _INSTALLED in harmless):
            return
        if not any(name == who or name.startswith(f"{who}.") for name in names for who in harmless):
            self._on_act(what, actor)

    def _reads(self, shared: set[bytes], name: Any) -> None:
        if isinstance(name, str | bytes) and os.fsencode(name) not in shared and tells_ranks_apart(os.fsdecode(name)):
            self._act(f"reads {os.fsdecode(name)}")

    def _seeds(self, generator: random.Random, a: Any = None, *_more: Any, **_named: Any) -> None:
        if a is not None:
            self._seeded.discard(generator)
        elif type(generator) is random.Random:
            self._act(_SEEDS)
            self._seeded.add(generator)

    def _opens(self, path: Any, _mode: Any, flags: Any) -> None:
        if isinstance(path, int) or path == os.devnull:
            return
        if isinstance(flags, int) and flags & _WRITE_FLAGS:
            self._act(_WRITES)
        elif not is_installed(os.fsdecode(path)):
            self.note(os.fsdecode(path))

    def _looks(self, is_listed: bool, path: Any = None, *_more: Any, **_named: Any) -> None:
        """Note a file whose presence a user's module asks for, or a directory that is listed."""
        if not isinstance(path, int) and not _actor()[2]:
            text = os.fsdecode("." if path is None else path)
            if is_listed or not os.access(os.path.join(text, ""), os.F_OK):
                self.note(text)

    def seed_anew(self) -> None:
        """Seed, in a rank, the generators that differ between processes; Python has seeded its own already."""
        numpy: Any = sys.modules.get("numpy.random")
        for generator in [*self._seeded, *([] if numpy is None else [numpy])]:
            generator.seed()

    # -- files of the user --------------------------------------------------------------------------------

    def note(self, path: str) -> None:
        """Note a file that is read now."""
        path = os.path.abspath(path)
        if not path.startswith(("/proc/", "/sys/", "/dev/")):
            self.files.setdefault(path, _facts(path))

    def note_modules(self) -> None:
        """Note the files of imported modules outside installed packages."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not file.startswith(_PACKAGE) and not is_installed(file):
                self.note(file)

    def changed_file(self) -> str | None:
        """Return a file of the user that has changed since it was read or imported; None without one."""
        return next((path for path, facts in self.files.items() if _facts(path) != facts), None)

    # -- what is left -------------------------------------------------------------------------------------

    def remains(self) -> str | None:
        """Return what an import has left in this process that no fork may share; None if there is nothing."""
        before, self._states = self._states, _generators()
        if drawn := [name for name, state in before.items() if self._states[name] != state]:
            return f"draws from {drawn[0]}, or seeds it"
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return "leaves a child process"
        cuda: Any = sys.modules.get("torch.cuda")
        if cuda is not None and cuda.is_initialized():
            return CUDA
        if thread_count() > 1:
            # counted after a fork: OpenBLAS, as libraries with fork handlers do, ends its threads before one
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            if thread_count() > 1:
                return "starts a thread of a C library"
        new = [what for place, what in _held().items() if place not in self._own and not _HARMLESS_DEVICES.search(what)]
        return CUDA if any("/dev/nvidia-uvm" in what for what in new) else next(iter(new), None)


def _generators() -> dict[str, Any]:
    """Return the states of the generators that differ between processes."""
    modules: Any = sys.modules
    found = {"random": modules["random"].getstate()}
    if "numpy.random.mtrand" in modules:
        _, key, position, *_ = modules["numpy.random.mtrand"]._rand.get_state()
        found["numpy.random"] = (key.tobytes(), position)
    return found


@functools.cache
def is_installed(file: str) -> bool:
    """Return True for a file of Python, or of an installed package; False for a file of the user."""
    return file.startswith("<frozen") or os.path.abspath(file).startswith(_STDLIB) or bool(_IN_PACKAGES.search(file))


def _actor() -> tuple[str, list[str], bool]:
    """Return the module that acts, the names of all that act for it, and whether it is of an installed package.

    Modules of Python act for others, if there are any. The name is empty if this package acts for itself.
    """
    names: list[str] = []
    actor = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if module == _SERVER:
            break
        if module == "__main__":
            return actor or module, names, False
        if not file.startswith((_PACKAGE, _IMPORT)):
            names += [module, f"{module}.{frame.f_code.co_name}"]
            actor, is_package = module, bool(_IN_PACKAGES.search(file))
            if is_package or not is_installed(file):
                return actor, names, is_package
        frame = frame.f_back
    return actor, names, False


def _facts(path: str) -> tuple[int, ...] | None:
    """Return size, time and inode; None if there is no such file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _held() -> dict[str, str]:
    """Return what a fork would share: open files, directories aside, by descriptor, and shared memory by address."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed them
            if not stat.S_ISDIR(os.fstat(int(fd)).st_mode):
                found[fd] = f"keeps {os.readlink(f'/proc/self/fd/{fd}')} open"
    with open("/proc/self/maps", errors="surrogateescape") as file:
        shared = _SHARED_MEMORY.findall(file.read())
    return {**found, **{place: f"has shared memory ({name or 'anonymous'})" for place, name in shared}}
