"""Who this process is, as an object that callers of the reference ask for."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from megatron_ft.core import rank_info
from megatron_ft.rank.base import agreement

__all__ = ["RankInfo"]


@dataclass
class RankInfo(rank_info.RankInfo):
    """Identity of one training process; see ``core.rank_info``."""

    @staticmethod
    def get_for_current_rank() -> RankInfo:
        """That of this process: of its process group, or as torchrun's environment tells it.

        Raises:
            RuntimeError: neither tells a rank.
        """
        if "RANK" not in os.environ and not agreement.has_process_group():
            raise RuntimeError("this process has no rank: RANK isn't set, and there is no process group")
        found = rank_info.RankInfo.from_environment(os.environ, socket.gethostname(), os.getpid())
        return RankInfo(**{**vars(found), "global_rank": agreement.rank()})
