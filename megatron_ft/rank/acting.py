"""Who does what: the user's own files, or a library that is being imported. For a script that is run ahead."""

from __future__ import annotations

import functools
import os
from types import FrameType

from megatron_ft.ipc.installed import installed_roots

__all__ = ["in_import", "is_librarys", "is_own", "place", "users_frame"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ROOTS = (*installed_roots(), _PACKAGE)
_INSTALLED = ("/site-packages/", "/dist-packages/")
_IMPORT = "<frozen importlib"


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is the user's: neither Python's, nor of an installed package, nor ours."""
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith(_ROOTS) and not any(part in path for part in _INSTALLED)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost call in a file of the user's; None if a library does it on its own while it is imported.

    A script or module that is installed is the user's, too, with all that it calls.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_IMPORT):
            return None
        if is_own(file) or frame.f_globals.get("__name__") == "__main__":
            return frame
        frame = frame.f_back
    return None


def is_librarys(frame: FrameType | None) -> bool:
    """Whether an installed package does it for a module of the user's that is being imported: a cache, say."""
    start = frame
    while frame is not None and not is_own(frame.f_code.co_filename):
        if any(part in frame.f_code.co_filename for part in _INSTALLED):
            return in_import(start)
        frame = frame.f_back
    return False


def in_import(frame: FrameType | None) -> bool:
    """Whether it happens while any module is imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORT):
            return True
        frame = frame.f_back
    return False


def place(frame: FrameType | None) -> str:
    """The innermost line of the user's that led there, as in "train.py:57"; empty if there is none."""
    while frame is not None:
        is_main = frame.f_globals.get("__name__") == "__main__" and not frame.f_code.co_filename.startswith("<")
        if is_main or is_own(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
