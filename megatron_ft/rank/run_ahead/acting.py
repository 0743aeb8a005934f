"""Who acts in a script that is run ahead, by the call stack: the user's own files, or a library being imported."""

from __future__ import annotations

import functools
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PYTHON = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_ROOTS = tuple(
    path.rstrip(os.sep) + os.sep
    for path in {_PACKAGE, *_PYTHON, *site.getsitepackages(), site.getusersitepackages()}
    if path
)
_INSTALLED = re.compile("/(site|dist)-packages/")
_IMPORT = "<frozen importlib"
_STDLIB = tuple(path.rstrip(os.sep) + os.sep for path in map(sysconfig.get_path, ("stdlib", "platstdlib")) if path)
_MEGATRON = re.compile(r"megatron\.(core|training|legacy|inference|post_training|rl|bridge)\b")
"""Packages of Megatron, which many run from a checkout: what they do while they are imported isn't the user's doing."""
_READ_OWN_VARIABLES = frozenset(
    {
        # these keep what begins with a prefix of their own
        *("tqdm", "networkx", "fsspec", "numba", "dask", "megatron.core.ssm.ops.common.determinism"),
        # of Python's: the environment of a program, which is watched for itself; *_proxy; a server's default
        *("subprocess", "ctypes.util", "platform", "uuid", "distutils.spawn", "urllib.request", "wsgiref.handlers"),
    }
)
"""Modules and packages that go over all variables while they are imported, and keep nothing of a rank."""
_FIND_FILES = ("os", "pathlib", "genericpath", "posixpath")
_ASK_WHETHER = frozenset(
    {"exists", "lexists", "isdir", "isfile", "islink", "ismount", "is_dir", "is_file", "is_symlink", "is_mount"}
)
_LOGGING = ("logging", "loguru", "structlog")


def callers() -> Iterator[FrameType]:
    """The calls that led here, the innermost first, without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not module_of(frame).startswith("megatron_ft."):
            yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """The name of the module that a call is in."""
    return str(frame.f_globals.get("__name__", ""))


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is the user's: neither Python's, nor of an installed package, nor ours."""
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith(_ROOTS) and not _INSTALLED.search(path)


def is_users(*, megatron: bool = True) -> bool:
    """Whether a file of the user's acts, with all that it calls; not a library on its own while it is imported.

    The script itself is the user's even if it is installed. ``megatron``: so are the files of a checkout of Megatron.
    """
    for frame in callers():
        file = frame.f_code.co_filename
        if file.startswith(_IMPORT):
            return False
        if is_own(file) and not megatron and _MEGATRON.match(module_of(frame)):
            continue
        if is_own(file) or module_of(frame) == "__main__":
            return True
    return False


def is_for_log() -> bool:
    """Return True if a logging library acts for the user, who only writes a message."""
    for frame in callers():
        if is_own(frame.f_code.co_filename) or module_of(frame) == "__main__":
            return False
        if module_of(frame).partition(".")[0] in _LOGGING:
            return True
    return False


def environment_reader() -> str | None:
    """Name of the library that goes over all variables: "settings"; empty for a file of the user's.

    None if the library is known to keep nothing that differs between ranks.
    """
    stdlib = ""
    for frame in callers():
        name, file = module_of(frame), frame.f_code.co_filename
        if file.startswith(_IMPORT):
            break
        if name == "__main__" or is_own(file):
            return ""
        if name in _READ_OWN_VARIABLES or name.partition(".")[0] in _READ_OWN_VARIABLES:
            return None
        # what Python's modules do (dict, copy, configparser) they do for others
        if not file.startswith("<") and (_INSTALLED.search(file) or not os.path.abspath(file).startswith(_STDLIB)):
            return name or os.path.basename(file)
        stdlib = stdlib or name
    return stdlib


def is_for_users_import() -> bool:
    """Whether an installed package acts for a module of the user's that is being imported: writes a cache, say."""
    for frame in callers():
        file = frame.f_code.co_filename
        if is_own(file):
            return False
        if _INSTALLED.search(file):
            return in_import()
    return False


def reads_times() -> bool:
    """Return True if the user's own file asks for more than whether a path is there: the time of a directory, too."""
    for frame in callers():
        if module_of(frame).partition(".")[0] not in _FIND_FILES:
            return is_own(frame.f_code.co_filename)
        if frame.f_code.co_name in _ASK_WHETHER:
            return False
    return False


def in_import() -> bool:
    """Whether any module is being imported."""
    return any(frame.f_code.co_filename.startswith(_IMPORT) for frame in callers())


def place() -> str:
    """The innermost line of the user's that led here, as in "train.py:57"; empty if there is none."""
    for frame in callers():
        file = frame.f_code.co_filename
        if is_own(file) or (module_of(frame) == "__main__" and not file.startswith("<")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
    return ""
