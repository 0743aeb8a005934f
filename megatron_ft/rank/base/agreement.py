"""Identity of this process among the ranks, and one value for all of them; with or without a process group.

torch is looked up, never imported: as long as the script hasn't imported it, there is no process group.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass
class RankInfo:
    """Identity of one training process."""

    global_rank: int
    """Rank in the whole job, from 0."""
    local_rank: int
    """Rank on this node, from 0."""
    host: str
    """Host name of the node."""
    pid: int
    """Process id of the rank on that node."""
    world_size: int = 1
    """Number of ranks in the job."""
    cycle: int = 0
    """Cycle of the job that this rank belongs to, from 0; the same on all nodes."""

    @staticmethod
    def get_for_current_rank() -> RankInfo:
        """Return the identity from the process group or torchrun's environment. Part of nvidia-resiliency-ext's API.

        Raises:
            RuntimeError: there is no process group, and RANK isn't set.
        """
        if "RANK" not in os.environ and not has_process_group():
            raise RuntimeError("this process has no rank: RANK isn't set, and there is no process group")
        found = RankInfo.from_environment(os.environ, socket.gethostname(), os.getpid())
        return replace(found, global_rank=rank())

    @staticmethod
    def from_environment(environ: Mapping[str, str], host: str, pid: int) -> RankInfo:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and FT_CYCLE; missing ones default to a job of one rank.

        Raises:
            ValueError: a variable isn't a whole number.
        """

        def number(name: str, default: int) -> int:
            text = environ.get(name, str(default))
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"environment variable {name}={text!r} is not a whole number") from None

        global_rank = number("RANK", 0)
        return RankInfo(
            global_rank=global_rank,
            local_rank=number("LOCAL_RANK", global_rank),
            host=host,
            pid=pid,
            world_size=number("WORLD_SIZE", 1),
            cycle=number("FT_CYCLE", 0),
        )


def rank() -> int:
    """Return the rank in the default process group, else RANK of the environment, else 0."""
    return _ask("get_rank", "RANK", 0)


def world_size() -> int:
    """Return the number of ranks, found like :func:`rank`."""
    return _ask("get_world_size", "WORLD_SIZE", 1)


def from_rank_0(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank. Collective; without a process group, returns ``value``."""
    dist = _process_group()
    if dist is None or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def has_process_group() -> bool:
    """Return True if the default process group is initialised."""
    return _process_group() is not None


def _process_group() -> Any:
    """Return ``torch.distributed`` if its default group is initialised, else None."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist


def _ask(function: str, variable: str, default: int) -> int:
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    try:
        return int(getattr(dist, function)())
    except (AttributeError, ValueError, RuntimeError):  # no torch, no support for groups, no group yet
        pass
    try:
        return int(os.environ.get(variable, default))
    except ValueError:
        return default
