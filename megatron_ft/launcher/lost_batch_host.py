"""Stand-in for the batch script of a Slurm job, by a launcher, if the script is gone with its host."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from megatron_ft.job.rules import batch_script
from megatron_ft.launcher.outcome import ResultFile

_COMMAND_S = 60.0
_SILENT_S = 5.0
_LOOK_S = 10.0
_KNOWS_S = 900.0
"""Seconds until Slurm must know: it notices the loss of a host after SlurmdTimeout, usually 300 s."""


def requeue_if_batch_host_lost(
    result: ResultFile, environ: Mapping[str, str], say: Callable[[str], None], *, port: int
) -> None:
    """Do what the batch script would do after the life's end, once Slurm has given up the script's host, too.

    ``port``: any on which a live host would answer, even by refusing.
    """
    job, ending = environ.get(batch_script.REQUEUES, ""), result.ending
    host = batch_script.host(environ.get("SLURM_JOB_NODELIST", ""))
    if not batch_script.may_stand_in(result.place, ending):
        return
    assert ending is not None
    until_s, is_refused = time.monotonic() + _KNOWS_S, False
    if not job or not host or host_answers(host, port):
        return
    result.flush()  # Slurm ends this launcher when it requeues the job
    if result.place:
        time.sleep(_LOOK_S)  # the launcher at place 0 may do it first
    while time.monotonic() < until_s:
        told = run_command(batch_script.show(job))
        if told is None:
            return
        words = batch_script.in_its_place(told, job, ending, is_refused=is_refused)
        if words:
            say(
                "the batch script's host is lost; this launcher runs what the script would have run: "
                f"{shlex.join(words)}"
            )
            if run_command(words) is not None or is_refused:
                return
            is_refused = True
        elif host_answers(host, port):
            return
        else:
            time.sleep(_LOOK_S)


def host_answers(host: str, port: int) -> bool:
    """Return True if the host answers, or has no address."""
    try:
        socket.create_connection((host, port), timeout=_SILENT_S).close()
    except (ConnectionRefusedError, socket.gaierror):
        return True
    except OSError:
        return False
    return True


def run_command(words: Sequence[str]) -> str | None:
    """Run a command and return its output; None if it fails, or doesn't exist, as in many containers."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
