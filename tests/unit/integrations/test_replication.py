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
        (2, 2, 8, [(0, 2), (1, 3), (4, 6), (5, 7)]),
        (4, 1, 4, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_groups_are_a_jump_apart(jump: int, factor: int, world: int, groups: list[tuple[int, ...]]) -> None:
    assert parse_group_sequence(jump, factor, world) == groups


def test_strategy_checks_its_numbers_and_makes_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.delattr(dist, "new_group")
    strategy = CliqueReplicationStrategy.from_replication_params(4, 2)
    assert isinstance(strategy, LazyCliqueReplicationStrategy)
    assert (strategy.replication_jump, strategy.replication_factor) == (4, 2)
    with pytest.raises(AssertionError, match="8 ranks"):
        CliqueReplicationStrategy.from_replication_params(3, 2)


def test_wrapper_is_of_a_group_or_of_the_only_one_that_has_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = GroupWrapper()
    assert GroupWrapper.wrap(wrapper) is wrapper
    with pytest.raises(ValueError, match="not str"):
        GroupWrapper.wrap("x")
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    assert GroupWrapper.from_list_of_groups([(0, 1), (2, 3)]).group == (2, 3)
    with pytest.raises(AssertionError, match="in 2 of the groups"):
        GroupWrapper.from_list_of_groups([(1, 2), (2, 3)])
