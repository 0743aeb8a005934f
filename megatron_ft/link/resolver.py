"""Timeout of the DNS resolver: a silent name server must not cost a restart seconds."""

from __future__ import annotations

import contextlib
import ctypes
import os

_OPTIONS = "timeout:1 attempts:5"
_STATE_BYTES = 4096  # larger than any struct __res_state


def ask_again_soon() -> None:
    """Let this process retry a silent name server after 1 s instead of 5 s, for as long in all.

    torch's store looks up its address for each rank that connects, and serves no other meanwhile: one lost answer made
    every rank wait. A RES_OPTIONS set by the user is kept; the ranks' own resolver stays as it is.
    """
    if "RES_OPTIONS" in os.environ:
        return
    os.environ["RES_OPTIONS"] = _OPTIONS
    try:
        libc, state = ctypes.CDLL(None), ctypes.create_string_buffer(_STATE_BYTES)
        with contextlib.suppress(AttributeError):  # another C library than glibc
            # reads the configuration shared by all threads, as any first query would
            libc.__res_ninit(state)
            libc.__res_nclose(state)
    finally:
        del os.environ["RES_OPTIONS"]  # it was read; the ranks inherit the environment
