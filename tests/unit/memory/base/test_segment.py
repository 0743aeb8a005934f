"""Segments: sealed, and read only if every digest is right."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from megatron_ft.core.errors import LayoutError
from megatron_ft.memory.base import digests, segment
from tests.memory.flips import HASHER, filled

CONTENT = {"a": bytes(range(256)) * 8, "b": b"x" * 32, "empty": b""}


@pytest.fixture
def fd() -> Iterator[int]:
    made = filled(CONTENT)
    yield made
    os.close(made)


def test_segment_that_is_not_sealed_is_refused(fd: int) -> None:
    with pytest.raises(LayoutError, match="isn't sealed"):
        segment.read_layout(fd, HASHER)


def test_sealed_segment_can_be_neither_written_nor_cut(fd: int) -> None:
    segment.seal(fd, os.fstat(fd).st_size)
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 10), lambda: os.ftruncate(fd, 10**6)):
        with pytest.raises(PermissionError):
            change()


def test_segment_cut_off_by_a_byte_is_refused(fd: int) -> None:
    segment.seal(fd, os.fstat(fd).st_size - 1)
    with pytest.raises(LayoutError):
        segment.read_layout(fd, HASHER)


def test_hash_function_is_xxh3_128() -> None:
    made = HASHER()
    made.update(b"")
    assert made.hexdigest() == "99aa06d3014798d86001c324468d497f"  # published by xxHash
    assert digests.installed() is digests.installed()


@pytest.mark.parametrize("block_bytes", [64, 1000, 1 << 20])
def test_tensors_are_compared_across_the_pieces_that_are_read(
    fd: int, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(segment, "BLOCK_BYTES", block_bytes)
    pauses: list[None] = []
    segment.seal(fd, os.fstat(fd).st_size)
    layout = segment.read_layout(fd, HASHER)
    segment.verify(fd, layout, HASHER, lambda: pauses.append(None))
    data_bytes = max(each.offset + each.nbytes for each in layout.tensors)
    assert len(pauses) >= data_bytes // block_bytes
    assert len(pauses) <= data_bytes // block_bytes + len(layout.tensors)
