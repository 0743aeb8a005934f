"""Who does what: the user's own files, or a library that is being imported. For a script that is run ahead."""

from __future__ import annotations

import functools
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType

__all__ = ["callers", "in_import", "is_librarys", "is_own", "is_users", "module_of", "place"]

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
    """The calls that led here, the innermost first, without our own: those that are in between are no library's."""
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
    """Whether a file of the user's does it; not if a library does it on its own while it is imported.

    A script or module that is installed is the user's, too, with all that it calls.
    """
    for frame in callers():
        file = frame.f_code.co_filename
        if file.startswith(_IMPORT):
            return False
        if is_own(file) or module_of(frame) == "__main__":
            return True
    return False


def is_librarys() -> bool:
    """Whether an installed package does it for a module of the user's that is being imported: a cache, say."""
    for frame in callers():
        file = frame.f_code.co_filename
        if is_own(file):
            return False
        if _INSTALLED.search(file):
            return in_import()
    return False


def in_import() -> bool:
    """Whether it happens while any module is imported."""
    return any(frame.f_code.co_filename.startswith(_IMPORT) for frame in callers())


def place() -> str:
    """The innermost line of the user's that led here, as in "train.py:57"; empty if there is none."""
    for frame in callers():
        file = frame.f_code.co_filename
        if is_own(file) or (module_of(frame) == "__main__" and not file.startswith("<")):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
    return ""
