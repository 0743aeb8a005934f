"""Groups of replicas as scripts ask for them: checked, and none is made."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_ft.integrations.replication import (
    CliqueReplicationStrategy,
    GroupWrapper,
    LazyCliqueReplicationStrategy,
    parse_group_sequence,
)


@pytest.mark.parametrize(
    ("jump", "factor", "world", "groups"),
    [
        (1, 2, 4, [(0, 1), (2, 3)]),
        (2, 2, 4, [(0, 2), (1, 3)]),
        (2, 2, 8, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (1, 3, 6, [(0, 1, 2), (3, 4, 5)]),
        (4, 1, 4, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_groups_are_a_jump_apart(jump: int, factor: int, world: int, groups: list[tuple[int, ...]]) -> None:
    assert parse_group_sequence(jump, factor, world) == groups


def test_strategy_checks_its_numbers_and_makes_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 8)
    monkeypatch.delattr(dist, "new_group")
    strategy = CliqueReplicationStrategy.from_replication_params(4, 2)
    assert isinstance(strategy, LazyCliqueReplicationStrategy)
    assert (strategy.replication_jump, strategy.replication_factor) == (4, 2)
    with pytest.raises(AssertionError, match="8 ranks"):
        CliqueReplicationStrategy.from_replication_params(3, 2)


def test_wrapper_without_a_process_group_is_this_process_alone() -> None:
    alone = GroupWrapper()
    assert (list(alone.ranks), alone.world_size, alone.my_group_rank, alone.my_global_rank) == ([0], 1, 0, 0)
    assert alone.all_gather_object("x") == ["x"]
    assert GroupWrapper.wrap(alone) is alone
    with pytest.raises(ValueError, match="not str"):
        GroupWrapper.wrap("x")
