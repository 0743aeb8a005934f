"""The scheduler's facts about this launcher's job, nodes and endpoint, from environment variables alone. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ft.core.config.torchrun import DEFAULT_PORT
from megatron_ft.core.errors import ConfigError
from megatron_ft.core.hosts import expand_hosts

_FIRST_PORT = 20000
_PORTS = 9000
"""Below Linux's ports of outgoing connections."""
_STEPS = 16
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""First number of Slurm's own steps (the batch script, an interactive shell)."""
_OTHER_STARTERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID")
"""Variables of programs that start one launcher on each node, as srun does."""


class Scheduler(enum.Enum):
    """Starter of this launcher; the values are those of ``--scheduler``."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class SchedulerEnvironment:
    """Facts about the job. Empty texts and None are unknown; nothing here was given by the user.

    Args:
        job: for people: "job 4711 step 0 restart 1".
        life: distinguishes this start of the job from all others, for launchers of any step.
        run_id: distinguishes this step, too: the rendezvous id.
        nodes: number of nodes with a launcher.
        launchers: number of launchers started, none of which is restarted when it has ended; 0: unknown.
        endpoint: host and port of the first of them.
        log_name: name of a directory for all nodes and starts of one training.
        own_log_name: name of that directory if this launcher's training is one of several started together.
        surplus: why some launchers would stand in each other's way, if not each is meant as a node.
        warnings: settings of the scheduler that defeat recovery.
        hint: why only one launcher runs, if the job has several nodes and the user seems to have forgotten the others.
    """

    scheduler: Scheduler = Scheduler.NONE
    job: str = ""
    life: str = ""
    run_id: str = ""
    nodes: int | None = None
    launchers: int = 0
    endpoint: str = ""
    log_name: str = ""
    own_log_name: str = ""
    surplus: str = ""
    warnings: tuple[str, ...] = ()
    hint: str = ""


def detect(environ: Mapping[str, str], choice: str = "auto", *, full_name: str = "") -> SchedulerEnvironment:
    """Return the facts. ``choice`` is that of ``--scheduler``; ``full_name`` is this host's, with its domain.

    Raises:
        ConfigError: there is no sign of that scheduler.
    """
    in_slurm = environ.get("SLURM_JOB_ID", "").isdecimal()
    in_kubernetes = bool(environ.get("KUBERNETES_SERVICE_HOST")) or "JOB_COMPLETION_INDEX" in environ
    if choice == "slurm" and not in_slurm:
        raise ConfigError("--scheduler slurm: SLURM_JOB_ID isn't set: this is no job of Slurm")
    if choice == "slurm" or (choice == "auto" and in_slurm):
        return _slurm(environ)
    if choice == "kubernetes" or (choice == "auto" and in_kubernetes):
        return _kubernetes(environ, full_name)
    return SchedulerEnvironment()


def _slurm(environ: Mapping[str, str]) -> SchedulerEnvironment:
    job, restart = environ["SLURM_JOB_ID"], environ.get("SLURM_RESTART_COUNT") or "0"
    step, tasks = _step(environ), _number(environ, "SLURM_STEP_NUM_TASKS") or 0
    told = f" restart {restart}" if restart != "0" else ""  # a "life" is another count: see job.rules.lives
    known = SchedulerEnvironment(
        scheduler=Scheduler.SLURM,
        job=f"job {job}{told}",
        life=f"{job}.{restart}",
        log_name=f"slurm-{job}" if step is None else f"slurm-{job}.{step}",
        hint=_forgotten_srun(environ),
    )
    first = hosts(environ, 1)
    if step is None or tasks < 2 or not first:
        return known  # a batch script, or one launcher
    nodes = _number(environ, "SLURM_STEP_NUM_NODES") or 1
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
    step = _number(environ, "SLURM_STEP_ID")
    return step if step is not None and step < _FIRST_SPECIAL_STEP else None


def _forgotten_srun(environ: Mapping[str, str]) -> str:
    nodes = _number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    if nodes == 1 or _step(environ) is not None or any(name in environ for name in _OTHER_STARTERS):
        return ""
    return f"the job has {nodes} nodes, but srun didn't start this launcher"


def _defeats(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return warnings about srun's own settings, as it passes them on."""
    told = []
    if environ.get("SLURM_KILL_BAD_EXIT", "0") not in ("", "0"):
        told.append(
            "SLURM_KILL_BAD_EXIT is set: srun terminates all tasks when one of them fails; add --kill-on-bad-exit=0"
        )
    if environ.get("SLURM_WAIT", "0") not in ("", "0"):
        told.append(
            f"SLURM_WAIT is {environ['SLURM_WAIT']}: srun terminates all tasks that many seconds after the first exit; "
            "add --wait=0"
        )
    return tuple(told)


def _kubernetes(environ: Mapping[str, str], full_name: str) -> SchedulerEnvironment:
    """Return the facts of a pod: an indexed Job calls its pods NAME-INDEX; a headless service is their domain."""
    index = environ.get("JOB_COMPLETION_INDEX", "")
    host, _, domain = full_name.partition(".")
    pod = re.fullmatch(r"(.+)-(\d+)", host)
    if pod is None or pod[2] != index:
        return SchedulerEnvironment(scheduler=Scheduler.KUBERNETES, job="a pod")
    return SchedulerEnvironment(
        scheduler=Scheduler.KUBERNETES,
        job=f"pod {index} of {pod[1]}",
        life=pod[1],
        run_id=pod[1],
        endpoint=f"{pod[1]}-0.{domain}:{DEFAULT_PORT}" if domain else "",
    )


# -- nodes ----------------------------------------------------------------------------------------------------


def hosts(environ: Mapping[str, str], most: int) -> tuple[str, ...]:
    """Return the first ``most`` hosts of Slurm's step, or of its job outside a step."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    return expand_hosts(listed, most)


def own_names(environ: Mapping[str, str], hostname: str) -> frozenset[str]:
    """Return the names by which the scheduler may know this machine."""
    return frozenset({hostname, hostname.partition(".")[0], environ.get("SLURMD_NODENAME") or hostname})


def rank(environ: Mapping[str, str], *, min_nodes: int, max_nodes: int) -> tuple[int | None, str]:
    """Return this launcher's rank among the job's, and the variable with it; None without one."""
    for name in ("GROUP_RANK", _slurm_variable(environ, min_nodes, max_nodes), "JOB_COMPLETION_INDEX"):
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value), name
    return None, ""


def _slurm_variable(environ: Mapping[str, str], min_nodes: int, max_nodes: int) -> str:
    """Return Slurm's variable that differs for each launcher; empty if none is known to.

    Only srun starts a task on each node. In a batch script all variables are 0, for all launchers that it starts.
    """
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is None:
        return ""
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    if tasks == max_nodes or 1 < nodes == tasks >= min_nodes:
        return "SLURM_PROCID"
    return "SLURM_NODEID" if nodes > 1 and nodes >= min_nodes else ""


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the value of the first of these variables that is a whole number."""
    for name in names:
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None
