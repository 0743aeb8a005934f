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


def is_users() -> bool:
    """Whether a file of the user's acts, with all that it calls; not a library on its own while it is imported.

    The script itself is the user's even if it is installed.
    """
    for frame in callers():
        file = frame.f_code.co_filename
        if file.startswith(_IMPORT):
            return False
        if is_own(file) or module_of(frame) == "__main__":
            return True
    return False


def is_for_users_import() -> bool:
    """Whether an installed package acts for a module of the user's that is being imported: writes a cache, say."""
    for frame in callers():
        file = frame.f_code.co_filename
        if is_own(file):
            return False
        if _INSTALLED.search(file):
            return in_import()
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
