"""Acts of an import that ranks can't share: seen by audit events, by stand-ins, and by what is left afterwards.

An act is told before it is done where an event or a stand-in sees it; threads, files and memory of C libraries are
found after the import. One table lists the acts that are known to be harmless, each with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import random
import re
import stat
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from megatron_ft.core.rank_variables import tells_ranks_apart
from megatron_ft.ipc.linux.processes import thread_count
from megatron_ft.rank.base.replacing import left_out_of_stacks

_THREAD, _PROCESS, _LISTENS = "starts a thread", "starts a process", "listens"
_WRITES, _TEMPORARY, _CHANGES = "writes a file", "makes a temporary file", "changes files"
_DRAWS, _ALL = "draws random numbers", "reads all of os.environ"

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
    # act, who (a module, a package, or a function of a module), why ranks may share it
    (_DRAWS, "multiprocessing.process", "a key that each rank draws anew"),
    (_DRAWS, "multiprocess.process", "a key that only processes of a rank among each other use"),
    (_DRAWS, "numpy.random", "the first seed of the global generator, which each rank seeds anew"),
    (_DRAWS, "tempfile", "a generator of names, which is made anew in each process"),
    (_DRAWS, "torch.distributed._composable.contract", "names of attributes, unique within a process"),
    (_DRAWS, "torch._dynamo", "names of functions in generated code, unique within a process"),
    (_DRAWS, "torch._inductor", "names in generated code, unique within a process"),
    (_DRAWS, "sympy", "numbers of nameless symbols, unique within a process"),
    (_DRAWS, "torch.fx", "names in generated code, unique within a process"),
    (_WRITES, "tempfile._get_default_tempdir", "a test whether a directory can be written, removed at once"),
    (_CHANGES, "tempfile._get_default_tempdir", "a test whether a directory can be written, removed at once"),
    (_WRITES, "filelock._strict", "a test whether links work, removed at once"),
    (_TEMPORARY, "filelock._strict", "a test whether links work, removed at once"),
    (_TEMPORARY, "ctypes.util", "output of gcc, removed at once"),
    (_TEMPORARY, "torch._dynamo", "a directory whose name a rank reads only to debug"),
    (_CHANGES, _INSTALLED, "directories for caches, and files in them, are the same for all ranks"),
    (_PROCESS, _INSTALLED, "a question about the machine: the package waits for the answer, or a child is found later"),
    (_PROCESS, "ctypes.util", "gcc and ldconfig, asked where a library is"),
    (_PROCESS, "platform", "uname and file, asked about the machine"),
    (_PROCESS, "megatron.core.package_info", "git, asked for the revision of a checkout"),
    (_PROCESS, "uuid", "ip and ifconfig, asked for the address of a network card"),
    (_LISTENS, "urllib3.util.connection", "a test whether there is IPv6, closed at once"),
    (_ALL, "tqdm", "keeps variables of its own prefix"),
    (_ALL, "networkx", "keeps variables of its own prefix"),
    (_ALL, "fsspec", "keeps variables of its own prefix"),
    (_ALL, "numba", "keeps variables of its own prefix"),
    (_ALL, "dask", "keeps variables of its own prefix"),
    (_ALL, "megatron.core.ssm.ops.common.determinism", "keeps variables of its own prefix"),
    (_ALL, "subprocess", "the environment of a program, whose start is an act of its own"),
    (_ALL, "urllib.request", "keeps proxies"),
    (_ALL, "ctypes.util", "the environment of gcc"),
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_IN_PACKAGES = re.compile("/(site|dist)-packages/")
_IMPORT = "<frozen importlib"
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NOT_FILES = ("/proc/", "/sys/", "/dev/")
_SHARED_MEMORY = re.compile(r"^(\S+) .w.s \S+ \S+ \S+ *(.*)$", re.MULTILINE)
_HARMLESS_DEVICES = re.compile(r"/dev/(null|zero|full|u?random|nvidiactl|nvidia\d+)$")
"""The last two: the driver's library that counts devices keeps them open; a process with CUDA also has nvidia-uvm."""


@functools.cache
def is_installed(file: str) -> bool:
    """Return True for a file of Python, or of an installed package; False for a file of the user."""
    return file.startswith("<frozen") or os.path.abspath(file).startswith(_STDLIB) or bool(_IN_PACKAGES.search(file))


_handlers: dict[str, Callable[..., None]] = {}
"""Handlers by audit event; empty while nothing is watched."""


class _Hook:
    """The audit hook. It can't be removed: in ranks it is a function of C that does nothing, and is in no stack."""

    __call__: Any = staticmethod(operator.is_)


def _audit(_hook: object, event: str, arguments: Any) -> None:
    handler = _handlers.get(event)
    if handler is not None:
        handler(event, *arguments)


class Watch:
    """Calls ``on_act`` with an act and the module that does it, while modules are imported within the block."""

    def __init__(self, on_act: Callable[[str, str], None]) -> None:
        self._on_act = on_act
        self.files: dict[str, tuple[int, ...] | None] = {}
        """Files of the user that were read, and their state at that time."""
        self._undo: list[tuple[Any, str, Any]] = []
        self._states: dict[str, Any] = {}
        self._made: list[tuple[weakref.ref[random.Random], Any]] = []
        """Generators that modules have seeded from the system, with their first state; None if it doesn't matter."""
        self._own_memory = _shared_memory()
        sys.addaudithook(_Hook())

    def __enter__(self) -> Watch:
        _Hook.__call__ = _audit  # type: ignore[method-assign]
        for what, events in _EVENTS.items():
            for event in events.split():
                _handlers[event] = functools.partial(self._event, what)
        _handlers["open"] = self._opens
        _handlers["os.listdir"] = _handlers["os.scandir"] = self._lists
        _handlers["os.putenv"] = _handlers["os.unsetenv"] = self._sets
        shared = {*os.environ._data}  # type: ignore[attr-defined]  # the same in all ranks, whatever their names are
        for environ in (os.environ, os.environb):
            encode: Any = environ.encodekey
            self._put(environ, "encodekey", functools.partial(self._encode, encode, shared))
        self._stand_in(threading.Thread, "start", lambda *_: self._act(_THREAD))  # Python 3.11 has no event
        self._stand_in(type(os.environ), "__iter__", lambda *_: self._act(_ALL))
        for owner, name in ((os, "urandom"), (os, "getrandom"), (random, "_urandom")):
            self._stand_in(owner, name, lambda *_: self._act(_DRAWS))
        self._put(random.Random, "seed", self._seeding(random.Random.seed))
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
        _Hook.__call__ = staticmethod(operator.is_)  # type: ignore[method-assign]
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _stand_in(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        """Call ``before`` first; a module that keeps the function goes on with the original once this is over."""
        original = getattr(owner, name)

        @functools.wraps(original)
        @left_out_of_stacks
        def stand_in(*arguments: Any, **named: Any) -> Any:
            if _handlers:
                before(*arguments, **named)
            return original(*arguments, **named)

        self._put(owner, name, stand_in)

    def _seeding(self, seed: Callable[..., None]) -> Callable[..., None]:
        """Note which generators are seeded from the system."""

        @functools.wraps(seed)
        @left_out_of_stacks
        def stand_in(generator: random.Random, a: Any = None, *more: Any, **named: Any) -> None:
            seed(generator, a, *more, **named)
            self._made = [made for made in self._made if made[0]() not in (None, generator)]
            if a is None and type(generator) is random.Random:
                state = None if _is_harmless(_DRAWS, *_actor()) else generator.getstate()
                self._made.append((weakref.ref(generator), state))

        return stand_in

    def seed_anew(self) -> None:
        """Seed, in a rank, the generators that differ between processes; Python has seeded its own already."""
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed()
        for reference, _ in self._made:
            if (generator := reference()) is not None:
                generator.seed()

    # -- who acts -----------------------------------------------------------------------------------------

    def _act(self, what: str) -> None:
        """Report an act, unless the table says that it is harmless."""
        actor, names, is_package = _actor()
        if actor and not _is_harmless(what, actor, names, is_package):
            self._on_act(what, actor)

    def _event(self, what: str, _event: str, *_arguments: Any) -> None:
        if not sys._getframe(2).f_code.co_filename.startswith(_IMPORT):  # Python writes its caches of modules
            self._act(what)

    def _opens(self, _event: str, path: Any, _mode: Any, flags: Any) -> None:
        if isinstance(path, int) or path == os.devnull or sys._getframe(2).f_code.co_filename.startswith(_IMPORT):
            return
        text = os.fsdecode(path)
        if isinstance(flags, int) and flags & _WRITE_FLAGS:
            self._act(_WRITES)
        elif not is_installed(text):
            self.note(text)

    def _lists(self, _event: str, path: Any = None) -> None:
        frame = sys._getframe(2)
        if not isinstance(path, int) and not frame.f_code.co_filename.startswith(_IMPORT):
            if not _actor()[2]:
                self.note("." if path is None else os.fsdecode(path))

    def _sets(self, _event: str, name: Any, *_value: Any) -> None:
        if tells_ranks_apart(os.fsdecode(name)):
            self._act(f"sets {os.fsdecode(name)}")

    def _encode(self, encode: Callable[[Any], bytes], shared: set[bytes], key: Any) -> bytes:
        """Encode the name of a variable, as every use of ``os.environ`` does first."""
        name = encode(key)
        if name not in shared and tells_ranks_apart(os.fsdecode(name)):
            self._act(f"reads {os.fsdecode(name)}")
        return name

    def note(self, path: str) -> None:
        """Note a file that is read now."""
        with contextlib.suppress(OSError, ValueError):  # no working directory; no such name
            path = os.path.abspath(path)
            if not path.startswith(_NOT_FILES):
                self.files.setdefault(path, _facts(path))

    def changed_file(self) -> str | None:
        """Return a file of the user that has changed since it was read or imported; None without one."""
        return next((path for path, facts in self.files.items() if _facts(path) != facts), None)

    # -- what is left -------------------------------------------------------------------------------------

    def remains(self, own_fds: set[int]) -> str | None:
        """Return what an import has left in this process that no fork may share; None if there is nothing."""
        before, self._states = self._states, _generators()
        drawn = [name for name, state in before.items() if self._states[name] != state]
        made = [(generator, state) for reference, state in self._made if (generator := reference()) is not None]
        drawn += ["a generator of its own" for each, state in made if state and each.getstate() != state]
        return (
            (f"draws from {drawn[0]}, or seeds it" if drawn else None)
            or _child()
            or _cuda()
            or _threads()
            or _open_file(own_fds)
            or self._memory()
        )

    def _memory(self) -> str | None:
        new = [file for place, file in _shared_memory().items() if place not in self._own_memory]
        return f"has shared memory ({new[0] or 'anonymous'})" if new else None


def _generators() -> dict[str, Any]:
    """Return the states of the generators that differ between processes: Python's and numpy's."""
    python: Any = sys.modules.get("random")
    numpy: Any = sys.modules.get("numpy.random.mtrand")
    found = {} if python is None else {"random": python.getstate()}
    if numpy is not None:
        _, key, position, *_ = numpy._rand.get_state()
        found["numpy.random"] = (key.tobytes(), position)
    return found


def _actor() -> tuple[str, list[str], bool]:
    """Return the module that acts, the names of all that act for it, and whether it is of an installed package.

    Modules of Python act for others, if there are any. Empty if Python's import acts for itself.
    """
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_IMPORT):
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if not file.startswith(_PACKAGE):
            names += [module, f"{module}.{frame.f_code.co_name}"]
            is_package = bool(_IN_PACKAGES.search(file))
            if is_package or not is_installed(file):
                return module, names, is_package
        frame = frame.f_back
    # a module in C has no frame: Python's import knows its name
    while names and frame is not None and "spec" not in frame.f_locals:
        frame = frame.f_back
    if names and frame is not None:
        names.append(str(getattr(frame.f_locals["spec"], "name", "")))
    return (names[-1] if names else ""), names, False


def _is_harmless(act: str, _actor: str, names: list[str], is_package: bool) -> bool:
    rows = [who for harmless, who, _reason in _HARMLESS if harmless == act]
    return any(is_package if who == _INSTALLED else any(_is_within(each, who) for each in names) for who in rows)


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _facts(path: str) -> tuple[int, ...] | None:
    """Return size, time and inode; None if there is no such file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _child() -> str | None:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return "leaves a child process"


def _cuda() -> str | None:
    cuda: Any = sys.modules.get("torch.cuda")
    return "initialises CUDA" if cuda is not None and cuda.is_initialized() else None


def _threads() -> str | None:
    """Count threads after a fork: OpenBLAS, as libraries with fork handlers do, ends its threads before one."""
    if thread_count() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return "starts a thread of a C library" if thread_count() > 1 else None


def _open_file(own: set[int]) -> str | None:
    for fd, link in descriptors(own).items():
        mode = os.fstat(fd).st_mode
        if not stat.S_ISDIR(mode) and not _HARMLESS_DEVICES.match(link):
            return "initialises CUDA" if link == "/dev/nvidia-uvm" else f"keeps {link} open"
    return None


def descriptors(without: set[int]) -> dict[int, str]:
    """Return open descriptors except ``without``, each with its target."""
    found = {}
    for fd in set(map(int, os.listdir("/proc/self/fd"))) - without:
        with contextlib.suppress(OSError):  # the descriptor that listed them
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _shared_memory() -> dict[str, str]:
    """Return the memory that a fork would share, by its addresses, each with its file."""
    with open("/proc/self/maps", errors="surrogateescape") as file:
        return dict(_SHARED_MEMORY.findall(file.read()))


def user_files() -> Iterator[str]:
    """Yield the files of imported modules outside installed packages."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith(_PACKAGE) and not is_installed(file):
            yield file
