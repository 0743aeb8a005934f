"""Who a rank is, as torchrun's environment tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["RankInfo"]


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
