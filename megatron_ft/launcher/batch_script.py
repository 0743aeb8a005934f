"""A launcher that does what is left to do with a job of Slurm's, where the batch script is gone with its host."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_ft.core.job import batch_script
from megatron_ft.launcher.outcome import ResultFile

_COMMAND_S = 60.0
_SILENT_S = 5.0
_LOOK_S = 10.0
_KNOWS_S = 900.0
"""Slurm notices the loss of a host after SlurmdTimeout, 300 s as a rule."""


def stand_in(result: ResultFile, environ: Mapping[str, str], say: Callable[[str], None], *, port: int) -> None:
    """The life has ended. If the script's host doesn't answer, wait until Slurm has given it up, too.

    ``port``: any on which that host would answer, and be it by a refusal.
    """
    job, ending = environ.get(batch_script.REQUEUES, ""), result.ending
    host = batch_script.host(environ.get("SLURM_JOB_NODELIST", ""))
    if not batch_script.may_stand_in(result.place, ending, is_decided=result.is_decided):
        return
    assert ending is not None
    until_s, is_refused = time.monotonic() + _KNOWS_S, False
    if not job or not host or _answers(host, port):
        return
    result.flush()  # Slurm ends this launcher when it requeues the job
    if result.place:
        time.sleep(_LOOK_S)  # the launcher at place 0 may be there
    while time.monotonic() < until_s:
        told = _run(batch_script.show(job))
        if told is None:
            return
        words = batch_script.in_its_place(told, job, ending, is_refused=is_refused)
        if words:
            say(
                "the batch script's host is lost; this launcher runs what the script would have run: "
                f"{shlex.join(words)}"
            )
            if _run(words) is not None or is_refused:
                return
            is_refused = True
        elif _answers(host, port):
            return
        else:
            time.sleep(_LOOK_S)


def _answers(host: str, port: int) -> bool:
    """Whether there is a host of that name, as far as can be known."""
    try:
        socket.create_connection((host, port), timeout=_SILENT_S).close()
    except (ConnectionRefusedError, socket.gaierror):
        return True
    except OSError:
        return False
    return True


def _run(words: Sequence[str]) -> str | None:
    """What it prints; None if it fails, or isn't there, as in many containers."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
