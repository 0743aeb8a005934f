"""Standard input of a script that is run ahead, whose reads raise no audit event."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from megatron_ft.rank.base.replacing import left_out_of_stacks


class WatchedInput(io.FileIO):
    """Descriptor 0; calls ``before`` ahead of each read, also in ranks, which may hang in one."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__(0, "rb", closefd=False)
        self.name = "<stdin>"
        self._before = before

    @left_out_of_stacks
    def readinto(self, buffer: Any) -> int | None:
        self._before()
        return super().readinto(buffer)

    @left_out_of_stacks
    def readall(self) -> bytes:
        self._before()
        return super().readall()
