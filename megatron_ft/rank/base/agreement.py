"""Who this process is among the ranks, and one value for all of them. Works with and without a process group.

torch is looked up, never imported: as long as the script hasn't imported it there is no process group.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["from_rank_0", "has_process_group", "rank", "world_size"]


def rank() -> int:
    """This process's rank in the default process group, else RANK of the environment, else 0."""
    return _ask("get_rank", "RANK", 0)


def world_size() -> int:
    """Number of ranks, found like :func:`rank`."""
    return _ask("get_world_size", "WORLD_SIZE", 1)


def from_rank_0(value: Any) -> Any:
    """Rank 0's ``value`` on every rank: a collective. Without a process group: the caller's own."""
    dist = _process_group()
    if dist is None or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def has_process_group() -> bool:
    """Whether the default process group is there."""
    return _process_group() is not None


def _process_group() -> Any:
    """``torch.distributed`` if its default group is initialised, else None."""
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
