"""What a monitor that comes in the place of another gets of it: its rank."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AttachedRank"]


class AttachedRank(NamedTuple):
    """What a replacement needs to go on where its predecessor stopped; the descriptors stay the caller's."""

    board_fd: int
    wake_fd: int
    pidfd: int
    stack_fd: int
    """A memory in which the rank writes its stacks when it is asked to, and its last exception."""
    ask_fd: int
    """A socket on which the rank answers what its collectives do."""
    pid: int
    rank: int
    cycle: int

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors, in the order of the fields."""
        return self[:5]
