"""Names of snapshots in files, which ranks they have, and the manifest."""

from __future__ import annotations

import json

import pytest

from megatron_ft.core.errors import LayoutError
from megatron_ft.core.memory import saved_files
from megatron_ft.core.memory.saved_files import Manifest, SavedSegment, lacking
from megatron_ft.core.memory.snapshots import SavedFiles, SnapshotKey

MANIFEST = Manifest(SnapshotKey(2, 7), 4, (SavedSegment(0, 100, "a" * 32), SavedSegment(1, 90, "b" * 32)))


def test_name_of_a_set_tells_iteration_and_world_and_differs_between_lives() -> None:
    names = {saved_files.set_name(7, 4, life) for life in ("one", "two")}
    assert len(names) == 2
    for name in names:
        assert saved_files.parse_set(name) == SavedFiles(name, 7, 4)


@pytest.mark.parametrize(
    ("names", "count"),
    [
        ((), 8),
        (("ranks-0-3", "ranks-4-7"), 0),
        (("ranks-0-3", "ranks-5-7"), 1),
        (("ranks-0-5", "ranks-2-3", "ranks-4-7"), 0),
        (("ranks-0-3", ".12-ab.tmp", "ranks-3-3"), 4),
        (("ranks-0-100",), 0),
        (("ranks-3-0",), 8),
    ],
)
def test_ranks_without_a_file_are_counted_by_names(names: tuple[str, ...], count: int) -> None:
    assert lacking(names, 8) == count


def test_ranks_of_a_node_are_in_one_directory_and_those_of_others_in_their_own() -> None:
    groups = saved_files.consecutive([3, 0, 1, 2, 9, 8])
    assert groups == [[0, 1, 2, 3], [8, 9]]
    assert [saved_files.part_name(group) for group in groups] == ["ranks-0-3", "ranks-8-9"]


def test_manifest_is_read_as_it_was_written() -> None:
    assert saved_files.decode(saved_files.encode(MANIFEST)) == MANIFEST


@pytest.mark.parametrize(
    "changed",
    [{"version": 2}, {"world": -1}, {"segments": [{"rank": 0, "nbytes": 1, "digest": "a"}]}, {"key": 3}],
    ids=["version", "world", "digest", "key"],
)
def test_manifest_that_is_malformed_is_refused(changed: dict[str, object]) -> None:
    document = {**json.loads(saved_files.encode(MANIFEST)), **changed}
    with pytest.raises(LayoutError, match="manifest"):
        saved_files.decode(json.dumps(document).encode())
