"""What a launcher can't do without: the step daemon that has started it, and readers of its output."""

from __future__ import annotations

import os
import socket

import pytest

from megatron_ft.launcher.base import orphan_watch


@pytest.mark.parametrize("half", [socket.SHUT_WR, None])
def test_output_that_is_read_or_has_no_reader_by_nature_is_no_reason_to_end(half: int | None) -> None:
    """Who has closed only its own writing end, as `ssh -n` does, reads on; a file has no reader."""
    near, far = socket.socketpair()
    if half is not None:
        far.shutdown(half)
    assert orphan_watch.has_reader(near.fileno())
    far.close()
    assert not orphan_watch.has_reader(near.fileno())
    near.close()
    with open(os.devnull) as file:
        assert not orphan_watch.has_reader(file.fileno())  # and so isn't watched
