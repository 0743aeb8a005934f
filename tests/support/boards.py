"""Boards as a monitor makes them."""

from __future__ import annotations

import os
import time
from typing import Any

from megatron_ft.link.board import Board, create_memory


def new_board(**values: Any) -> Board:
    """Return the initialised board of rank 0 in cycle 0; ``values``: others of `Board.initialise`."""
    fd = create_memory()
    board = Board(fd)
    os.close(fd)
    known = {"cycle": 0, "rank": 0, "pid": os.getpid(), "start_ns": time.monotonic_ns(), "warmup_iterations": 0}
    board.initialise(**{**known, **values})
    return board
