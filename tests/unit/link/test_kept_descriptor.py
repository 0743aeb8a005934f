"""Descriptors in a process whose script may close all of them, and open its own under their numbers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ft.link.board import Board, create_memory
from megatron_ft.link.linux.kept_descriptor import KeptDescriptor

KINDS: dict[str, Callable[[], int]] = {
    "eventfd": lambda: os.eventfd(0),
    "memfd": lambda: os.memfd_create("ours"),
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "pipe": lambda: os.pipe()[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_number_is_ours_until_another_file_has_it(kind: str) -> None:
    kept = KeptDescriptor(KINDS[kind]())
    number = kept.number
    assert kept.is_ours
    other = KINDS[kind]()  # of the same kind: an event counter has no inode of its own
    os.dup2(other, number)
    assert not kept.is_ours
    kept.close()
    os.fstat(number)  # still open
    os.close(number)
    kept = KeptDescriptor(other)
    kept.close()
    assert not kept.is_ours
    os.dup2(0, other)
    kept.close()
    os.close(other)  # still open


def test_board_that_is_closed_closes_no_file_that_got_the_number_of_its_mapping(tmp_path: Path) -> None:
    fd = create_memory()
    board = Board(fd)
    mapped = board._own_fd.number
    assert mapped not in (-1, fd)
    with (tmp_path / "mine").open("w") as file:
        os.dup2(file.fileno(), mapped)
    board.close()
    os.fstat(mapped)
    os.close(mapped)
    os.close(fd)
