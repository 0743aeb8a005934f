"""Which node keeps copies of which other node's snapshots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.job.rules.leader_part import ToNodes
from megatron_ft.memory.leader.snapshots_part import SnapshotsAtLeader
from megatron_ft.memory.rules.snapshots import CopyTo, KeeperPort


def leader(nodes: int, segment: int = 0) -> SnapshotsAtLeader:
    part = SnapshotsAtLeader()
    decision = SimpleNamespace(cycle=3, world=nodes, attachments={})
    cycle: Any = SimpleNamespace(decision=decision, rules=SimpleNamespace(segment=segment))
    part.begin(cycle)
    return part


def serves(part: SnapshotsAtLeader, place: int, port: int) -> list[tuple[list[int] | None, str]]:
    """Who is told where to copy when the keeper of that node takes copies."""
    node: Any = SimpleNamespace(address_of=lambda port: f"node-{place}:{port}")
    answers = [each for each in part.hear(node, place, KeeperPort(3, port), 0.0) if isinstance(each, ToNodes)]
    return [(each.places, each.message.address) for each in answers if isinstance(each.message, CopyTo)]


@pytest.mark.parametrize(("nodes", "segment"), [(2, 0), (3, 0), (8, 2), (12, 4), (4, 4), (1000, 16)])
def test_copies_are_kept_in_another_segment(nodes: int, segment: int) -> None:
    part, found = leader(nodes, segment), dict[int, int]()
    for place in range(nodes):
        found |= {at: int(address[5:-2]) for places, address in serves(part, place, 1) for at in places or ()}
    assert sorted(found) == sorted(found.values()) == list(range(nodes))
    assert all(place != target for place, target in found.items())
    if nodes > segment > 0:
        assert all(target // segment != place // segment for place, target in found.items())
