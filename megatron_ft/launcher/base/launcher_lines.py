"""The launcher's lines about itself: processes, signals, files. Lines about cycles: launcher/rules/cycle_lines.py.

Standard error may be closed, and may be shared with other launchers of the job.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from megatron_ft.link.base.wording import counted, printable
from megatron_ft.link.linux.processes import ProcessStat
from megatron_ft.link.log import INFO, LAUNCHER, WARNING

_WARNING = "warning: "
OBSERVING_ONLY = "observe-only: hung ranks are reported, not killed"


def say(text: str) -> None:
    """Print one line for the user, in which nothing of what came from elsewhere can act on a terminal."""
    LAUNCHER.say(WARNING if text.startswith(_WARNING) else INFO, printable(text))


def make_printer(*, has_others: bool) -> Callable[[str], None]:
    """Return ``say``; in a job of several nodes, with time and host name, as their output is mixed."""
    if not has_others:
        return say
    host = socket.gethostname()
    return lambda text: say(f"{time.strftime('%H:%M:%S')} {host}: {text}")


def user_mistake(text: str) -> str:
    """Format a user error on the command line or in the configuration, as argparse does."""
    return f"ft_launcher: error: {' '.join(text.split())}"


def stuck(stats: Sequence[ProcessStat]) -> str:
    """Format processes that SIGKILL doesn't or may not end, with their states: D is a wait in the kernel."""
    owner = {True: ", of another user", False: ""}
    told = ", ".join(f"{stat.pid} ({stat.comm}, state {stat.state}{owner[stat.is_anothers]})" for stat in stats)
    return f"process {told}" if len(stats) == 1 else f"processes {told}"


def did_not_end(stats: Sequence[ProcessStat], *, waited_s: float) -> str:
    """Format processes that survived SIGKILL and hold what new ranks need."""
    return f"{stuck(stats)} still running {waited_s:g} s after SIGKILL, not waiting any longer"


def forwarded(name: str, *, ranks: Sequence[int], unready: Sequence[int]) -> str:
    """Format the result of a signal of ``--ft-forward-signals``; local ranks."""
    if not ranks and not unready:
        return f"{name} dropped: no rank runs now"
    who, has = ("local rank", "has") if len(unready) == 1 else ("local ranks", "have")
    kept = f"{who} {', '.join(map(str, unready))} {has} no handler for {name} (yet)" if unready else ""
    if not ranks:
        return f"{name} not forwarded: {kept}"
    return f"{name} forwarded to {counted(len(ranks), 'rank')}" + (f", {kept}" if kept else "")


def in_one_line(error: BaseException) -> str:
    """Format an unexpected error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def cannot_start(error: OSError) -> str:
    """Format what the launcher can't get before the job begins: open files, a directory for sockets."""
    return f"the launcher can't start: {in_one_line(error)}"


def launcher_failed(error: BaseException) -> str:
    """Format a failure of the launcher itself, not of a rank."""
    return f"the launcher failed: {in_one_line(error)}"


def rendezvous_failed(error: BaseException) -> str:
    """Format a failed rendezvous, with the first and the last error of the chain."""
    causes = []
    current: BaseException | None = error
    while current is not None:
        causes.append(" ".join(str(current).split()) or type(current).__name__)
        current = current.__cause__
    return f"the rendezvous failed: {causes[0].removesuffix(' See inner exception for details.')}" + (
        f" ({causes[-1].partition(' Exception raised from')[0]})" if len(causes) > 1 else ""
    )
