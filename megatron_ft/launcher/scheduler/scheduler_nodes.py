"""What the scheduler says of the nodes of a job, from its environment variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ft.core.hosts import expand_hosts

__all__ = ["hosts", "number", "own_names", "rank"]


def hosts(environ: Mapping[str, str], most: int) -> tuple[str, ...]:
    """The first ``most`` hosts of Slurm's step, or of its job where this is no step."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    return expand_hosts(listed, most)


def own_names(environ: Mapping[str, str], hostname: str) -> frozenset[str]:
    """By these names the scheduler may know this machine."""
    return frozenset({hostname, hostname.partition(".")[0], environ.get("SLURMD_NODENAME") or hostname})


def rank(environ: Mapping[str, str], *, min_nodes: int, max_nodes: int) -> tuple[int | None, str]:
    """The rank that this launcher has among the job's, and the variable that says so; None where none does."""
    for name in ("GROUP_RANK", _slurm_variable(environ, min_nodes, max_nodes), "JOB_COMPLETION_INDEX"):
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value), name
    return None, ""


def _slurm_variable(environ: Mapping[str, str], min_nodes: int, max_nodes: int) -> str:
    """The one of Slurm's that is different for each launcher; empty if none is known to be.

    Only srun starts a task on each node. In a batch script they are all 0, for all launchers that it starts.
    """
    tasks = number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks is None:
        return ""
    nodes = number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    if tasks == max_nodes or 1 < nodes == tasks >= min_nodes:
        return "SLURM_PROCID"
    return "SLURM_NODEID" if nodes > 1 and nodes >= min_nodes else ""


def number(environ: Mapping[str, str], *names: str) -> int | None:
    """The value of the first of these variables that is a whole number."""
    for name in names:
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None
