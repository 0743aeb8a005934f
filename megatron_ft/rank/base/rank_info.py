"""Who a rank is, as its process group or torchrun's environment says."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ft.rank.base import agreement


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
    """Life of the worker group this rank belongs to, from 0; the same on all nodes."""

    @staticmethod
    def get_for_current_rank() -> RankInfo:
        """That of this process: of its process group, or as torchrun's environment says; as the reference has it.

        Raises:
            RuntimeError: neither says a rank.
        """
        if "RANK" not in os.environ and not agreement.has_process_group():
            raise RuntimeError("this process has no rank: RANK isn't set, and there is no process group")
        found = RankInfo.from_environment(os.environ, socket.gethostname(), os.getpid())
        return replace(found, global_rank=agreement.rank())

    @staticmethod
    def from_environment(environ: Mapping[str, str], host: str, pid: int) -> RankInfo:
        """Read RANK, LOCAL_RANK, WORLD_SIZE and FT_CYCLE; what is missing is that of a job of one rank.

        Raises:
            ValueError: one of them isn't a whole number.
        """

        def number(name: str, default: int) -> int:
            text = environ.get(name, str(default))
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"environment variable {name}={text!r} is not a whole number") from None

        rank = number("RANK", 0)
        return RankInfo(
            global_rank=rank,
            local_rank=number("LOCAL_RANK", rank),
            host=host,
            pid=pid,
            world_size=number("WORLD_SIZE", 1),
            cycle=number("FT_CYCLE", 0),
        )
