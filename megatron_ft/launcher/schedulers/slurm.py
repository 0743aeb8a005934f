"""Slurm: what a step tells its launchers, and the batch script's last act where the script is gone with its host."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from megatron_ft.errors import ConfigError
from megatron_ft.job.rules import batch_script
from megatron_ft.job.rules.lives import Ending
from megatron_ft.launcher.schedulers.facts import SchedulerEnvironment, number
from megatron_ft.link.base.hosts import expand_hosts

_FIRST_PORT = 20000
_PORTS = 9000
"""Below Linux's ports of outgoing connections."""
_STEPS = 16
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""First number of Slurm's own steps (the batch script, an interactive shell)."""
_OTHER_STARTERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")
"""Variables of programs that start one launcher on each node, as srun does."""
_COMMAND_S = 60.0
_SILENT_S = 5.0
_LOOK_S = 10.0
_KNOWS_S = 900.0
"""Seconds until Slurm must know: it notices the loss of a host after SlurmdTimeout, usually 300 s."""


def detect(environ: Mapping[str, str], *, full_name: str, is_asked: bool) -> SchedulerEnvironment | None:
    """Return the facts of a job; None if this is none.

    Raises:
        ConfigError: this is no job, but ``--scheduler`` says so.
    """
    if not environ.get("SLURM_JOB_ID", "").isdecimal():
        if is_asked:
            raise ConfigError("--scheduler slurm: SLURM_JOB_ID isn't set: this is no job of Slurm")
        return None
    job, restart = environ["SLURM_JOB_ID"], environ.get("SLURM_RESTART_COUNT") or "0"
    step, tasks = _step(environ), number(environ, "SLURM_STEP_NUM_TASKS") or 0
    told = f" restart {restart}" if restart != "0" else ""  # a "life" is another count: see job.rules.lives
    known = SchedulerEnvironment(
        scheduler="slurm",
        job=f"job {job}{told}",
        life=f"{job}.{restart}",
        log_name=f"slurm-{job}" if step is None else f"slurm-{job}.{step}",
        hint=_forgotten_srun(environ),
        save_signals=(signal.SIGUSR1, signal.SIGUSR2),
    )
    first = hosts(environ, 1)
    if step is None or tasks < 2 or not first:
        return known  # a batch script, or one launcher
    nodes = number(environ, "SLURM_STEP_NUM_NODES") or 1
    port = _FIRST_PORT + (int(job) * _STEPS + step) % _PORTS
    return replace(
        known,
        job=f"job {job} step {step}{told}",
        run_id=f"{job}.{step}.{restart}",
        nodes=nodes,
        launchers=tasks,
        endpoint=f"{first[0]}:{port}",
        own_log_name=f"{known.log_name}.{task}" if (task := environ.get("SLURM_PROCID", "")).isdecimal() else "",
        surplus="" if tasks == nodes else f"srun has started {tasks} launchers on {nodes} node{'s' * (nodes > 1)}",
        warnings=_defeats(environ) if nodes > 1 else (),
    )


def _step(environ: Mapping[str, str]) -> int | None:
    """Return the number of the step in which srun started this process; None in a batch script or interactive step."""
    step = number(environ, "SLURM_STEP_ID")
    return step if step is not None and step < _FIRST_SPECIAL_STEP else None


def _forgotten_srun(environ: Mapping[str, str]) -> str:
    nodes = number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    if nodes == 1 or _step(environ) is not None or any(name in environ for name in _OTHER_STARTERS):
        return ""
    return f"the job has {nodes} nodes, but srun didn't start this launcher"


def _defeats(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return warnings about srun's own settings, as it passes them on."""
    seconds = environ.get("SLURM_WAIT")
    told = {
        "SLURM_KILL_BAD_EXIT": "is set: srun terminates all tasks when one of them fails; add --kill-on-bad-exit=0",
        "SLURM_WAIT": f"is {seconds}: srun terminates all tasks that many seconds after the first exit; add --wait=0",
    }
    return tuple(f"{name} {text}" for name, text in told.items() if environ.get(name, "0") not in ("", "0"))


def hosts(environ: Mapping[str, str], most: int) -> tuple[str, ...]:
    """Return the first ``most`` hosts of Slurm's step, or of its job outside a step."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    return expand_hosts(listed, most)


def own_names(environ: Mapping[str, str], hostname: str) -> frozenset[str]:
    """Return the names by which the scheduler may know this machine."""
    return frozenset({hostname, hostname.partition(".")[0], environ.get("SLURMD_NODENAME") or hostname})


def rank_variable(environ: Mapping[str, str], min_nodes: int, max_nodes: int) -> str:
    """Return Slurm's variable that differs for each launcher; empty if none is known to.

    Only srun starts a task on each node. In a batch script all variables are 0, for all launchers that it starts.
    """
    tasks = number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is None:
        return ""
    nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    if tasks == max_nodes or 1 < nodes == tasks >= min_nodes:
        return "SLURM_PROCID"
    return "SLURM_NODEID" if nodes > 1 and nodes >= min_nodes else ""


def requeue(
    environ: Mapping[str, str],
    place: int | None,
    ending: Ending | None,
    port: int,
    say: Callable[[str], None],
    flush: Callable[[], None],
) -> None:
    """Do what the batch script would do after the life's end, once Slurm has given up the script's host, too.

    ``port``: any on which a live host would answer, even by refusing. ``place``: of this node in the last cycle. Slurm
    ends this launcher when it requeues the job: ``flush`` brings out its result before.
    """
    job, host = environ.get(batch_script.REQUEUES, ""), "".join(expand_hosts(environ.get("SLURM_JOB_NODELIST", ""), 1))
    # the launcher at place 0 does it, or the next one, if that was on the script's host
    if place not in (0, 1) or ending is None or not job or not host or host_answers(host, port):
        return
    flush()
    until_s, is_refused = time.monotonic() + _KNOWS_S, False
    if place:
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


def host_answers(host: str, port: int, timeout_s: float = _SILENT_S) -> bool:
    """Return True if the host answers, or has no address."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
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
