"""Exits of ranks, in words. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection

from megatron_ft.diagnosis.exceptions import is_peer_loss, without_empty_message
from megatron_ft.link.base.rerun import describe_rerun
from megatron_ft.link.base.signal_rules import signal_name
from megatron_ft.link.facts.launcher import RankExited

_OWN_FAULTS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"})
_MAX_ERROR_CHARACTERS = 200
_SOON_S = 60.0
"""Lifetime below which a rank that was never watched counts as failed in its start; later it may have trained."""
_TELLING_CODES = (2, 126, 127)
"""Wrong argument (argparse), command that can't be run, command not found."""
_SHELL_SIGNALS = 128
"""Offset a shell adds to the signal that ended its command."""
_LONGEST = 300
_MISTAKES = ("ModuleNotFoundError: ", "SyntaxError: ", "IndentationError: ", "NameError: ")
"""Exceptions that are mistakes in the script, whatever their text mentions."""
_FROM_OUTSIDE = (
    *("address already in use", "eaddrinuse", "connection", "broken pipe", "eoferror", "timeout", "timed out"),
    *("unreachable", "no route to host", "name resolution", "name or service not known", "network"),
    *("distnetworkerror", "diststoreerror", "distbackenderror", "gloo", "nccl", "rccl", "ucx"),
    *("cuda", "cublas", "cudnn", "hip error", "device", "driver", "acceleratorerror", "ecc error"),
    *("out of memory", "cannot allocate memory", "memoryerror", "no space left", "disk quota", "shm"),
    *("input/output error", "stale file handle", "remote i/o", "read-only file system", "transport endpoint"),
    *("too many open files", "temporarily unavailable", "resource busy", "unavailable", "try again"),
)
"""Texts of exceptions, in lower case, after which another start, elsewhere or a moment later, may succeed."""


def crashed_of_exception(rank_exit: RankExited) -> bool:
    """Return True if the rank raised, and crashed while its interpreter ended."""
    return rank_exit.error is not None and is_crash(rank_exit.exitcode)


def is_by_us(exitcode: int, signals_sent: Collection[int]) -> bool:
    """Return True if a rank ended because launcher or monitor had signalled it.

    A SIGKILL that neither of them sent came from elsewhere, whatever they sent before.
    """
    return bool(signals_sent) and (exitcode != -signal.SIGKILL or signal.SIGKILL in signals_sent)


def is_crash(exitcode: int) -> bool:
    """Return True for the end by a signal that a process causes itself."""
    return exitcode < 0 and signal_name(-exitcode) in _OWN_FAULTS


def describe_exit(rank_exit: RankExited) -> str:
    """Return how a rank ended: "rank 1 killed by SIGKILL (not sent by ft_launcher)".

    A rank that raised may crash while its interpreter ends: the exception is named first.
    """
    who, code = f"rank {rank_exit.rank}", rank_exit.exitcode
    name = signal_name(-code) if code < 0 else ""
    is_crash_of_its_own = name in _OWN_FAULTS and not rank_exit.by_us
    if rank_exit.rerun is not None and rank_exit.rerun_state is not None:
        text = describe_rerun(who, rank_exit.rerun, rank_exit.rerun_state)
    elif rank_exit.error is not None and (code > 0 or is_crash_of_its_own):
        text = f"{who} raised {one_line(rank_exit.error)}" + (f" (then crashed with {name})" if name else "")
    elif code == 0:
        text = f"{who} finished"
    elif code > 0:
        # a shell reports the signal that ended its command as 128 + number
        inner = signal_name(code - _SHELL_SIGNALS) if code > _SHELL_SIGNALS else ""
        text = f"{who} exited with code {code}" + (f" (128 + {inner})" if inner.startswith("SIG") else "")
        text += ", its error file can't be read" if rank_exit.unread else ""
    elif is_crash_of_its_own:
        text = f"{who} crashed with {name}"
    else:
        text = f"{who} killed by {name}" + ("" if rank_exit.by_us else " (not sent by ft_launcher)")
    return text + (" after its run had ended" if rank_exit.after_run else "")


def was_ending(rank_exit: RankExited, *, has_raised: bool = False) -> bool:
    """Return True if a rank was ending of its own exception when it was signalled; ``has_raised``: that was seen then.

    An interpreter may take a second to end, and closes its connections before that: the others can be quicker.
    """
    return (has_raised or 0 < rank_exit.raised_at_ns < rank_exit.signalled_at_ns) and has_own_error(rank_exit)


def is_secondary_failure(rank_exit: RankExited) -> bool:
    """Return True if a rank only failed because it had lost another one, as its exception says."""
    return (rank_exit.exitcode > 0 or is_crash(rank_exit.exitcode)) and is_peer_loss(rank_exit.error or "")


def has_own_error(rank_exit: RankExited) -> bool:
    """Return True if a rank has raised an exception that isn't the consequence of another rank's exit."""
    return rank_exit.error is not None and not is_peer_loss(rank_exit.error)


def failure_signature(end: RankExited, *, is_watched: bool, lived_s: float) -> str:
    """Return how a rank failed before its first step, in words that are the same for the same user error.

    Empty if another start may well get further. ``is_watched``: its monitoring had begun, so that its steps would have
    been seen.
    """
    is_shell_signal = end.exitcode > _SHELL_SIGNALS
    was_killed = end.exitcode <= 0 and not crashed_of_exception(end)
    if was_killed or is_shell_signal or (not is_watched and lived_s > _SOON_S):
        return ""
    if end.error is None:
        return f"exit code {end.exitcode}" if is_watched or end.exitcode in _TELLING_CODES else ""
    is_mistake = f"{end.error}: ".startswith(_MISTAKES)
    error = end.error.lower()
    if not is_mistake and any(sign in error for sign in _FROM_OUTSIDE):
        return ""
    return end.error[:_LONGEST]


def one_line(text: str) -> str:
    """Return an exception's text in one line of at most 200 characters."""
    line = without_empty_message(" ".join(text.split()))
    return line if len(line) <= _MAX_ERROR_CHARACTERS else line[: _MAX_ERROR_CHARACTERS - 3] + "..."
