"""How a rank failed in its start, in words that are the same for the same mistake of the user. Pure."""

from __future__ import annotations

from megatron_ft.core.diagnosis.exits import RankExit

__all__ = ["failure_signature"]

_SOON_S = 60.0
"""A rank that was never watched may have trained; one that lived for less than this counts as failed in its start."""
_TELLING_CODES = (2, 126, 127)
"""A wrong argument (argparse), a command that can't be run, and one that isn't there."""
_SHELL_SIGNALS = 128
"""A shell reports the signal that ended its command as a code beyond this one."""
_LONGEST = 300
_MISTAKES = ("ModuleNotFoundError: ", "SyntaxError: ", "IndentationError: ", "NameError: ")
"""They are the script's, whatever their text mentions."""
_FROM_OUTSIDE = (
    *("address already in use", "eaddrinuse", "connection", "broken pipe", "eoferror", "timeout", "timed out"),
    *("unreachable", "no route to host", "name resolution", "name or service not known", "network"),
    *("distnetworkerror", "diststoreerror", "distbackenderror", "gloo", "nccl", "rccl", "ucx"),
    *("cuda", "cublas", "cudnn", "hip error", "device", "driver", "acceleratorerror", "ecc error"),
    *("out of memory", "cannot allocate memory", "memoryerror", "no space left", "disk quota", "shm"),
    *("input/output error", "stale file handle", "remote i/o", "read-only file system", "transport endpoint"),
    *("too many open files", "temporarily unavailable", "resource busy", "unavailable", "try again"),
)
"""In an exception's text, in lower case: another start, on other nodes or a moment later, may go well."""


def failure_signature(end: RankExit, *, is_watched: bool, lived_s: float) -> str:
    """Of a rank that was through no step; empty where another start may well get further.

    ``is_watched``: it had begun its monitoring, so that its steps would have been seen.
    """
    is_shell_signal = end.exitcode > _SHELL_SIGNALS
    was_killed = end.exitcode <= 0 and not end.crashed_of_exception
    if was_killed or is_shell_signal or (not is_watched and lived_s > _SOON_S):
        return ""
    if end.error is None:
        return f"exit code {end.exitcode}" if is_watched or end.exitcode in _TELLING_CODES else ""
    is_mistake = end.error.startswith(_MISTAKES)
    told = end.error.lower()
    if not is_mistake and any(sign in told for sign in _FROM_OUTSIDE):
        return ""
    return end.error[:_LONGEST]
