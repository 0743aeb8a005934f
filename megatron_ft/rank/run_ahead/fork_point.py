"""The line at which a script's ranks may begin at the latest."""

from __future__ import annotations

import sys

__all__ = ["fork_point"]


def fork_point() -> None:
    """Say that what follows belongs to one rank, in one cycle: ``ft_launcher`` forks the ranks here at the latest.

    Wherever the script isn't run ahead, this does nothing.
    """
    run_ahead = sys.modules.get("megatron_ft.rank.run_ahead.script")
    if run_ahead is not None:
        run_ahead.stop("calls fork_point()")
