"""Which node keeps copies of which other node's snapshots."""

from __future__ import annotations

import pytest

from megatron_ft.memory.leader.snapshot_copies import SnapshotCopies
from megatron_ft.memory.rules.snapshots import CopyTo


def targets(nodes: int, segment: int) -> dict[int, int]:
    """The places of the nodes that keep copies, by those of the nodes whose copies they are."""
    copies, found = SnapshotCopies(0, nodes, segment), {}
    for place in range(nodes):
        found |= {at: int(told.address) for at, told in copies.serves(place, str(place))}
    return found


@pytest.mark.parametrize(("nodes", "segment"), [(2, 0), (3, 0), (8, 2), (12, 4), (4, 4), (10_000, 16)])
def test_each_node_keeps_copies_of_one_other(nodes: int, segment: int) -> None:
    found = targets(nodes, segment)
    assert sorted(found) == sorted(found.values()) == list(range(nodes))
    assert all(place != target for place, target in found.items())


@pytest.mark.parametrize(("nodes", "segment"), [(8, 2), (12, 4), (32, 16)])
def test_copies_are_kept_in_another_segment(nodes: int, segment: int) -> None:
    assert all(target // segment != place // segment for place, target in targets(nodes, segment).items())


def test_job_of_one_node_has_no_copies() -> None:
    assert SnapshotCopies(0, 1, 0).serves(0, "a:1") == []


def test_node_is_told_where_its_copies_go_once_both_serve() -> None:
    copies = SnapshotCopies(3, 3, 0)
    assert copies.serves(1, "b:1") == []
    assert copies.serves(0, "a:1") == [(0, CopyTo(3, "b:1"))]
    assert copies.serves(2, "c:1") == [(2, CopyTo(3, "a:1")), (1, CopyTo(3, "c:1"))]


def test_two_nodes_keep_copies_of_each_other() -> None:
    copies = SnapshotCopies(0, 2, 0)
    assert copies.serves(0, "a:1") == []
    assert copies.serves(1, "b:1") == [(1, CopyTo(0, "a:1")), (0, CopyTo(0, "b:1"))]


def test_node_that_serves_at_another_address_has_its_copies_sent_there() -> None:
    copies = SnapshotCopies(0, 2, 0)
    copies.serves(0, "a:1")
    copies.serves(1, "b:1")
    assert copies.serves(1, "b:2") == [(1, CopyTo(0, "a:1")), (0, CopyTo(0, "b:2"))]
