"""Finds who acts in a script that is run ahead, by the call stack: a user's file, or a library being imported."""

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
"""Packages of Megatron, often run from a checkout: what they do during import isn't the user's doing."""
_READ_OWN_VARIABLES = frozenset(
    {
        # these keep variables with a prefix of their own
        *("tqdm", "networkx", "fsspec", "numba", "dask", "megatron.core.ssm.ops.common.determinism"),
        # modules of Python's: environment of a program, which is watched elsewhere; *_proxy; a server's default
        *("subprocess", "ctypes.util", "platform", "uuid", "distutils.spawn", "urllib.request", "wsgiref.handlers"),
    }
)
"""Modules and packages that read all variables during import, and keep nothing that differs between ranks."""
_FIND_FILES = ("os", "pathlib", "genericpath", "posixpath")
_ASK_WHETHER = frozenset(
    {"exists", "lexists", "isdir", "isfile", "islink", "ismount", "is_dir", "is_file", "is_symlink", "is_mount"}
)
_LOGGING = ("logging", "loguru", "structlog")


def callers() -> Iterator[FrameType]:
    """Yield the frames that led here, innermost first, without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not module_of(frame).startswith("megatron_ft."):
            yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Return the name of a frame's module."""
    return str(frame.f_globals.get("__name__", ""))


@functools.cache
def is_own(file: str) -> bool:
    """Return True for a user's file: not Python's, not of an installed package, not ours."""
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith(_ROOTS) and not _INSTALLED.search(path)


def is_users(*, megatron: bool = True) -> bool:
    """Return True if a user's file acts, directly or through calls; False for a library during its import.

    The script itself is the user's even if installed. ``megatron``: files of a Megatron checkout are, too.
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
    """Return True if a logging library acts: the user only writes a message."""
    for frame in callers():
        if is_own(frame.f_code.co_filename) or module_of(frame) == "__main__":
            return False
        if module_of(frame).partition(".")[0] in _LOGGING:
            return True
    return False


def environment_reader() -> str | None:
    """Return the library that reads all variables, as "settings"; empty for a user's file.

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
        # dict, copy, configparser and the like act for their callers
        if not file.startswith("<") and (_INSTALLED.search(file) or not os.path.abspath(file).startswith(_STDLIB)):
            return name or os.path.basename(file)
        stdlib = stdlib or name
    return stdlib


def is_for_users_import() -> bool:
    """Return True if an installed package acts for a user's module being imported, as to write a cache."""
    for frame in callers():
        file = frame.f_code.co_filename
        if is_own(file):
            return False
        if _INSTALLED.search(file):
            return in_import()
    return False


def reads_times() -> bool:
    """Return True if the user's own file asks for more than a path's existence, such as a directory's time."""
    for frame in callers():
        if module_of(frame).partition(".")[0] not in _FIND_FILES:
            return is_own(frame.f_code.co_filename)
        if frame.f_code.co_name in _ASK_WHETHER:
            return False
    return False


def in_import() -> bool:
    """Return True while any module is being imported."""
    return any(frame.f_code.co_filename.startswith(_IMPORT) for frame in callers())


def place() -> str:
    """Return the innermost line of a user's file that led here, as in "train.py:57"; empty if there is none."""
    for frame in callers():
        file = frame.f_code.co_filename
        if is_own(file) or (module_of(frame) == "__main__" and not file.startswith("<")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
    return ""
