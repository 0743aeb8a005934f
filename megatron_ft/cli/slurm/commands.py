"""The commands of Slurm that are run, as words, and what they print; two more are in core/job/batch_script. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ft.core.job.batch_script import REQUEUES

_TELLS = "FT_BAD_NODES_TOLD_BY"
FOR_LAUNCHERS = (_TELLS, REQUEUES)
"""Variables that ``srun_environment`` sets."""
_DEFEATS = ("SLURM_KILL_BAD_EXIT", "SLURM_WAIT")


@dataclass(frozen=True, kw_only=True)
class Job:
    """As ``scontrol show job`` has it."""

    state: str
    nodes: int
    hosts: str


def srun(*, nodes: int, exclude: Sequence[str], more: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """One launcher on each node; neither one that ends nor a node that is lost ends the others."""
    shape = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    others = [f"--exclude={','.join(exclude)}"] if exclude else []
    stays = ["--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--cpu-bind=none"]
    # by default srun does what sbatch was told: after --export=NONE launchers would lack FT_SECRET, and all else
    return ["srun", *shape, *others, *stays, *([] if export_of(more) else ["--export=ALL"]), *more, *launcher]


def export_of(options: Sequence[str]) -> str:
    """Value of srun's --export among these options; empty if it isn't given."""
    given = ""
    for index, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name == "--export":
            given = value if equals else next(iter(options[index + 1 :]), "")
    return given


def not_exported(export: str, names: Iterable[str]) -> list[str]:
    """Variables that don't reach the launchers with this value of srun's --export."""
    words = [word.partition("=")[0] for word in export.split(",")]
    return [] if not export or "ALL" in words else [name for name in names if name not in words]


def srun_environment(environ: Mapping[str, str], *, requeues: str) -> dict[str, str]:
    """Without what would have launchers warn of settings that the options above have overruled; and bad nodes are
    reported here, not by them. ``requeues``: the job that is requeued if there is more to train; empty: none is.
    """
    kept = {name: value for name, value in environ.items() if name not in (*_DEFEATS, REQUEUES)}
    return {**kept, _TELLS: "megatron-ft slurm", **({REQUEUES: requeues} if requeues else {})}


def stop_steps(job: str) -> list[str]:
    """SIGTERM for the job's steps: each launcher gets it once. srun itself would end the step without a save."""
    return ["scancel", "--signal=TERM", job]


def on_each_node(job: int, *, nodes: int, status: Sequence[str]) -> list[str]:
    """Beside what runs on the nodes of a job, without taking anything from it; one that is lost ends no other.

    The number of nodes has to be given: outside of the job's own scripts srun would take one of them.
    """
    shape = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    beside = ["--overlap", "--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    return ["srun", f"--jobid={job}", *shape, *beside, "--export=ALL", "--label", *status]


def end_array(array: str) -> list[str]:
    """Cancel the tasks of an array that haven't begun."""
    return ["scancel", "--state=PENDING", array]


def avoid(job: str, nodes: Sequence[str]) -> list[str]:
    """Keep the job off these nodes from its next start on."""
    return ["scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"]


def allocation(text: str) -> Job | None:
    """What ``batch_script.show`` has printed; None if it isn't that."""
    found = dict(re.findall(r"(?:^|\s)(JobState|NumNodes|NodeList)=(\S*)", text))
    nodes = re.match(r"\d+", found.get("NumNodes", ""))
    if "JobState" not in found or nodes is None:
        return None
    return Job(state=found["JobState"], nodes=int(nodes[0]), hosts=found.get("NodeList", ""))
