"""The commands srun and scontrol show, as words, and their output; two more are in job/rules/batch_script. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.job.rules.batch_script import REQUEUES

_TELLS = "FT_BAD_NODES_TOLD_BY"
FOR_LAUNCHERS = (_TELLS, REQUEUES)
"""Variables set by ``srun_environment``."""
_DEFEATS = ("SLURM_KILL_BAD_EXIT", "SLURM_WAIT")


@dataclass(frozen=True, kw_only=True)
class Job:
    """State of a job, as printed by ``scontrol show job``."""

    state: str
    nodes: int
    hosts: str


def srun(*, nodes: int, exclude: Sequence[str], more: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """Return the srun command with one launcher per node; neither an ended launcher nor a lost node ends the others."""
    shape = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    others = [f"--exclude={','.join(exclude)}"] if exclude else []
    stays = ["--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none"]
    # by default srun inherits sbatch's --export: after --export=NONE launchers would lack FT_SECRET, and all else
    return ["srun", *shape, *others, *stays, *([] if export_of(more) else ["--export=ALL"]), *more, *launcher]


def export_of(options: Sequence[str]) -> str:
    """Return the value of srun's --export among these options; empty if it isn't given."""
    given = ""
    for index, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name == "--export":
            given = value if equals else next(iter(options[index + 1 :]), "")
    return given


def not_exported(export: str, names: Iterable[str]) -> list[str]:
    """Return the variables that don't reach the launchers with this value of srun's --export."""
    words = [word.partition("=")[0] for word in export.split(",")]
    return [] if not export or "ALL" in words else [name for name in names if name not in words]


def srun_environment(environ: Mapping[str, str], *, requeues: str) -> dict[str, str]:
    """Return the environment of srun.

    Drops variables about which launchers would warn although the options above have overruled them, and has bad nodes
    reported here. ``requeues``: job that is requeued if there is more to train.
    """
    kept = {name: value for name, value in environ.items() if name not in _DEFEATS}
    return {**kept, _TELLS: "megatron-ft slurm", REQUEUES: requeues}


def allocation(text: str) -> Job | None:
    """Parse the output of ``batch_script.show``; None if it is something else."""
    found = dict(re.findall(r"(?:^|\s)(JobState|NumNodes|NodeList)=(\S*)", text))
    nodes = re.match(r"\d+", found.get("NumNodes", ""))
    if "JobState" not in found or nodes is None:
        return None
    return Job(state=found["JobState"], nodes=int(nodes[0]), hosts=found.get("NodeList", ""))
