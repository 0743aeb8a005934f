"""Snapshots in files: names of their directories, and the manifest of the files in one. Pure.

DIR/iteration-1207-of-16-3f2a9c0d41b7/    all ranks' files; the last part tells one life of the job from others
    ranks-0-7/                            one node's; it has this name once it is whole
        rank-0 ... rank-7                 segments, byte by byte
        manifest                          written last: size and digest of each
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable

from megatron_ft.core import codec
from megatron_ft.core.codec import Count, Fact, Rank, WorldSize
from megatron_ft.core.errors import LayoutError, ProtocolError
from megatron_ft.core.memory.segment_layout import DIGEST_BYTES
from megatron_ft.core.memory.snapshots import SavedFiles, SnapshotKey

VERSION = 1
MANIFEST = "manifest"
_SET = re.compile(r"iteration-(\d{1,18})-of-(\d{1,7})-[0-9a-f]{12}")
_PART = re.compile(r"ranks-(\d{1,8})-(\d{1,8})")


class SavedSegment(Fact, frozen=True):
    """One rank's file. ``digest``: of its layout, which has those of all tensors; hexadecimal."""

    rank: Rank
    nbytes: Count
    digest: str


class Manifest(Fact, frozen=True):
    """Files of one node. ``key``: as in them."""

    key: SnapshotKey
    world: WorldSize
    segments: tuple[SavedSegment, ...]
    version: Count = VERSION


def set_name(iteration: int, world: int, life: str) -> str:
    """Return the name of a snapshot's directory; ``life``: any text that no other life of the job has."""
    return f"iteration-{iteration}-of-{world}-{hashlib.sha256(life.encode()).hexdigest()[:12]}"


def parse_set(name: str) -> SavedFiles | None:
    found = _SET.fullmatch(name)
    return None if found is None else SavedFiles(name, int(found[1]), int(found[2]))


def part_name(ranks: Collection[int]) -> str:
    """Return the name of the directory with the files of these ranks, which are consecutive."""
    return f"ranks-{min(ranks)}-{max(ranks)}"


def parse_part(name: str) -> range | None:
    """Return the ranks whose files are in a directory; None if it isn't that of a node."""
    found = _PART.fullmatch(name)
    return None if found is None else range(int(found[1]), int(found[2]) + 1)


def file_name(rank: int) -> str:
    return f"rank-{rank}"


def lacking(parts: Iterable[str], world: int) -> int:
    """Return the number of ranks of which there is no file, by the names of the directories."""
    ends = sorted((found.start, found.stop) for found in map(parse_part, parts) if found is not None)
    covered = reached = 0
    for start, stop in ends:
        covered += max(0, min(stop, world) - max(start, reached))
        reached = max(reached, stop)
    return world - covered


def consecutive(ranks: Iterable[int]) -> list[list[int]]:
    """Return the ranks in groups without gaps."""
    groups: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if groups and groups[-1][-1] + 1 == rank:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return groups


def encode(manifest: Manifest) -> bytes:
    """Return the JSON of a manifest."""
    return codec.encode(manifest)


def decode(raw: bytes) -> Manifest:
    """Return the manifest of its JSON.

    Raises:
        LayoutError: it is malformed.
    """
    try:
        manifest = codec.decode(Manifest, raw)
    except ProtocolError as error:
        raise LayoutError(f"the manifest is malformed: {error}") from None
    if manifest.version != VERSION:
        raise LayoutError(f"the manifest is of version {manifest.version}, not {VERSION}")
    if any(len(each.digest) != 2 * DIGEST_BYTES for each in manifest.segments):
        raise LayoutError("the manifest has a file without a digest")
    return manifest
