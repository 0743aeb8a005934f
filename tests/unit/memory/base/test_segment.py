"""Segments: sealed, and read only if every digest is right."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from megatron_ft.errors import LayoutError
from megatron_ft.memory.base import digests, segment
from tests.memory.flips import DIGEST, filled

CONTENT = {"a": bytes(range(256)) * 8, "b": b"x" * 32, "empty": b""}


@pytest.fixture
def fd() -> Iterator[int]:
    made = filled(CONTENT)
    yield made
    os.close(made)


def test_segment_that_is_not_sealed_is_refused(fd: int) -> None:
    with pytest.raises(LayoutError, match="isn't sealed"):
        segment.read_layout(fd, DIGEST)


def test_sealed_segment_can_be_neither_written_nor_cut(fd: int) -> None:
    segment.seal(fd, os.fstat(fd).st_size)
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 10), lambda: os.ftruncate(fd, 10**6)):
        with pytest.raises(PermissionError):
            change()


def test_hash_function_is_xxh3_128() -> None:
    assert DIGEST([b""]).hex() == "99aa06d3014798d86001c324468d497f"  # published by xxHash
    assert digests.installed() is digests.installed()


@pytest.mark.parametrize("buffer_bytes", [64, 1000, 1 << 20])
def test_changed_byte_is_found_in_any_block_that_is_read(fd: int, buffer_bytes: int) -> None:
    size = os.fstat(fd).st_size
    os.pwrite(fd, b"?", 2047)
    segment.seal(fd, size)
    layout, buffer = segment.read_layout(fd, DIGEST), memoryview(bytearray(buffer_bytes))
    segment.verify(fd, layout, 1, buffer, DIGEST)
    with pytest.raises(LayoutError, match=r"state\['a'\] has changed"):
        segment.verify(fd, layout, 0, buffer, DIGEST)
