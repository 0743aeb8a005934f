"""Replication as scripts ask nvidia-resiliency-ext for it: keepers copy segments between nodes, ranks take no part.

No process group is made and no tensor is sent here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.rank.base import agreement


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[tuple[int, ...]]:
    """Return groups of ``replication_factor`` ranks each, with ``replication_jump`` between two ranks of a group.

    Raises:
        AssertionError: the ranks can't be divided like that.
    """
    jump, factor = replication_jump, replication_factor
    assert jump > 0, f"the replication jump must be positive, not {jump}"
    assert factor > 0, f"the replication factor must be positive, not {factor}"
    block = jump * factor
    groups = f"groups of {factor} ranks with {jump} between two of them"
    assert world_size % block == 0, (
        f"{world_size} ranks can't be divided into {groups}: {block} must divide their number"
    )
    return [
        tuple(range(first, first + block, jump)) for at in range(0, world_size, block) for first in range(at, at + jump)
    ]


class GroupWrapper:
    """Process group, or all ranks if None."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    @staticmethod
    def wrap(group: Any) -> GroupWrapper:
        """Return a wrapper of a group.

        Raises:
            ValueError: it isn't a group.
        """
        if isinstance(group, GroupWrapper):
            return group
        if isinstance(group, dist.ProcessGroup):
            return GroupWrapper(group)
        raise ValueError(f"a process group is needed, not {type(group).__name__}")

    @staticmethod
    def from_list_of_groups(list_of_groups: Sequence[Any]) -> GroupWrapper:
        """Return a wrapper of the only group that has this rank."""
        rank = dist.get_rank()
        mine = [group for group in list_of_groups if rank in dist.get_process_group_ranks(group)]
        assert len(mine) == 1, f"rank {rank} is in {len(mine)} of the groups, not in one"
        return GroupWrapper(mine[0])


class ReplicationStrategy:
    """Wish for replicas in other ranks' nodes."""


class CliqueReplicationStrategy(ReplicationStrategy):
    """Wish that each rank of a group has the snapshots of all."""

    def __init__(self, local_group: Any, target_device: str = "cpu") -> None:
        self.local_group = GroupWrapper.wrap(local_group)
        self.target_device = target_device

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> LazyCliqueReplicationStrategy:
        """Check the numbers, as the groups of `parse_group_sequence` would be made; none is."""
        wish = LazyCliqueReplicationStrategy(replication_jump, replication_factor)
        parse_group_sequence(wish.replication_jump, wish.replication_factor, agreement.world_size())
        return wish


class LazyCliqueReplicationStrategy(ReplicationStrategy):
    """Wish that each snapshot is in the nodes of ``replication_factor`` ranks, ``replication_jump`` apart."""

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        """``replication_jump``: None: number of GPUs of this node."""
        self.replication_jump = torch.cuda.device_count() if replication_jump is None else replication_jump
        self.replication_factor = replication_factor
