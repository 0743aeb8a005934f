"""Variables of ranks, and a file, under the names of nvidia-resiliency-ext."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ft.launcher.base.command_line import CommandLine
from megatron_ft.launcher.schedulers import schedulers
from megatron_ft.link.file_queue import bounded_call


def variables(cycle: int, now_s: float, waiting_s: float, infra_rank: int | None) -> dict[str, str]:
    """Return the variables that Megatron-LM reads: cycle, wall-clock times, and the scheduler's number of this node.

    ``waiting_s``: seconds since this node began to wait for the cycle. The first cycle has no such time: it is the
    scheduler's.
    """
    values = {
        "NVRX_CYCLE": str(cycle),
        "NVRX_LAUNCH_TIME": repr(now_s),
        "NVRX_MEMBERSHIP": "active",
    }
    if cycle:
        values["NVRX_CYCLE_START_TIME"] = repr(now_s - waiting_s)
    return values if infra_rank is None else {**values, "NVRX_INFRA_RANK": str(infra_rank)}


def infra_rank(line: CommandLine, environ: Mapping[str, str]) -> int | None:
    """Return this node's number: --node-rank, else the scheduler's."""
    if line.node_rank is not None:
        return line.node_rank
    return schedulers.rank(environ, min_nodes=line.min_nodes, max_nodes=line.max_nodes)


def checkpointed(path: str | None) -> int | None:
    """Return the iteration of the last checkpoint; None if the file is missing, or holds no number."""
    if path is None:
        return None

    def read() -> int | None:
        with open(path) as file:
            return int(file.read(64))

    try:
        return bounded_call(read, None)
    except (OSError, ValueError):
        return None
