"""The one line that says whose client a script has that imports the reference's."""

from __future__ import annotations

import sys

import megatron_ft
from megatron_ft.rank.base.rank_info import RankInfo
from megatron_ft.rank.base.say import print_rank_0
from megatron_ft.rank.reference import finder

__all__ = ["say_whose"]


def say_whose(info: RankInfo) -> None:
    """On rank 0, in the first cycle, where the names are served and were imported."""
    if info.cycle == 0 and finder.is_in_use():
        print_rank_0(
            f"FT: nvidia_resiliency_ext.fault_tolerance is megatron_ft {megatron_ft.__version__} here "
            "(ft_launcher --ft-reference-names off: the package itself)",
            file=sys.stderr,
        )
