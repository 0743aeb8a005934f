"""What a job of one node restores."""

from __future__ import annotations

import pytest

from megatron_ft.core.memory.snapshots import Kept, KeptSnapshot, SnapshotKey
from megatron_ft.launcher.memory.single_node import newest

OLD, NEW = SnapshotKey(0, 6), SnapshotKey(1, 5)


@pytest.mark.parametrize(
    ("kept", "chosen"),
    [
        ([], None),
        ([KeptSnapshot(OLD, 2, (0, 1))], OLD),
        ([KeptSnapshot(OLD, 2, (0, 1)), KeptSnapshot(NEW, 2, (0, 1))], NEW),  # of a later cycle, though not iteration
        ([KeptSnapshot(OLD, 2, (0, 1)), KeptSnapshot(NEW, 2, (1,))], OLD),
        ([KeptSnapshot(OLD, 4, (0, 1))], None),
    ],
)
def test_newest_snapshot_that_all_ranks_have_is_chosen(kept: list[KeptSnapshot], chosen: SnapshotKey | None) -> None:
    assert newest(Kept(tuple(kept)), [0, 1], 2) == chosen
