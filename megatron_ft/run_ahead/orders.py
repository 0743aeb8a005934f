"""What a launcher asks of a fork server. Pure."""

from __future__ import annotations

from typing import NamedTuple

FORK_SERVER_NAME = "ft_fork_server"
"""Process name of the fork server; its forks have it, too, until they become ranks."""
RUN_AHEAD_VARIABLE = "MEGATRON_FT_RUN_AHEAD"
"""Variable with a server's orders, removed before it imports anything."""


class Orders(NamedTuple):
    """The script whose imports are to be shared, with its environment."""

    command: list[str]
    """Command of the ranks: this Python, "-u", and a script or module with its arguments."""
    environment: dict[str, str]
    """Environment common to all ranks."""
    preload: tuple[str, ...] = ()
    """Modules to import before those of the script, at the user's request."""
    left_out: tuple[str, ...] = ()
    """Imports that act: each rank does them itself."""
    ends_first: bool = False
    """True: the shared part ends at the first of them, because there were too many."""
