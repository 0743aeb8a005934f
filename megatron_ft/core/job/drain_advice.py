"""What an operator of the cluster can do about a bad node, as commands. They are printed, never run. Pure."""

from __future__ import annotations

import shlex

__all__ = ["advice", "drain"]

_LONGEST_REASON = 100


def drain(node: str, reason: str) -> list[str]:
    """Have Slurm give the node to no other job."""
    return ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason[:_LONGEST_REASON]}"]


def advice(scheduler: str, node: str, reason: str) -> str:
    """A line about a bad node; ``scheduler`` is "slurm", "kubernetes" or another. In a pod, ``node`` is its name."""
    told = f"bad node {node}: {reason}"
    if scheduler == "slurm":
        return f"{told}. To drain it: {shlex.join(drain(node, reason))}; to do without it: sbatch --exclude={node}"
    if scheduler == "kubernetes":
        where = f"kubectl get pod {shlex.quote(node)} -o 'jsonpath={{.spec.nodeName}}'"
        return f'{told}. To keep pods from its machine: kubectl cordon "$({where})"'
    return told
