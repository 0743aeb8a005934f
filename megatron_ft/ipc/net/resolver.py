"""Name servers that don't answer must not cost a restart seconds."""

from __future__ import annotations

import contextlib
import ctypes
import os

_OPTIONS = "timeout:1 attempts:5"
_STATE_BYTES = 4096  # more than a struct __res_state has anywhere


def ask_again_soon() -> None:
    """Let this process ask a name server that is silent again after 1 s, not after 5, and as long in all.

    For each rank that connects, torch's store asks for the name of its address, and serves no other meanwhile: one
    lost answer made every rank wait. A RES_OPTIONS that the user sets is kept; the ranks' own name service
    stays as it is.
    """
    if "RES_OPTIONS" in os.environ:
        return
    os.environ["RES_OPTIONS"] = _OPTIONS
    try:
        libc, state = ctypes.CDLL(None), ctypes.create_string_buffer(_STATE_BYTES)
        with contextlib.suppress(AttributeError):  # another C library than glibc, which has other ways
            # reads the configuration that all threads share, as the first question of any of them would
            libc.__res_ninit(state)
            libc.__res_nclose(state)
    finally:
        del os.environ["RES_OPTIONS"]  # it was read; the ranks inherit the environment
