"""What is run ahead, and which environment variables differ between ranks or cycles. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_ft.core.errors import ConfigError

FORK_SERVER_NAME = "ft_fork_server"
"""The kernel's name of the process that forks ranks; what it forks has it, too, until it is a rank."""
RUN_AHEAD_VARIABLE = "MEGATRON_FT_RUN_AHEAD"
"""Carries a server's orders, and is removed before its script runs."""
WATCH_VARIABLE = "FT_WATCH_COLLECTIVES"
"""Whether a rank's collectives are watched if its script calls no hooks: "on" or "off"."""
REFERENCE_NAMES_VARIABLE = "MEGATRON_FT_REFERENCE_NAMES"
"""In a rank and what it starts: "on" where this package serves the names of nvidia-resiliency-ext."""
_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("FT_CYCLE", "FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET", WATCH_VARIABLE),
        *("NVRX_CYCLE", "NVRX_LAUNCH_TIME", "NVRX_CYCLE_START_TIME", "NVRX_INFRA_RANK", "NVRX_MEMBERSHIP"),
    }
)


class Ahead(NamedTuple):
    """What to run ahead."""

    command: list[str]
    """Command of the ranks: this Python, "-u", and a script or module with its arguments."""
    environment: dict[str, str]
    """Environment of the ranks, without what differs between them."""
    preload: tuple[str, ...]
    """Modules to import before the script, which the user asked for."""
    shares_output: bool
    """Standard output and standard error of the ranks go where those of the launcher do."""


def parse_preload(text: str | None) -> tuple[str, ...] | None:
    """The names of ``--ft-preload a,b``; None for "none": no fork server at all.

    Raises:
        ConfigError: something in it is no name of a module.
    """
    if text is None or not text.strip():
        return ()
    if text.strip().lower() == "none":
        return None
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"--ft-preload: {name!r} is no name of a module; give names as in a,b.c or none")
    return tuple(dict.fromkeys(names))


def is_set_for_ranks(name: str) -> bool:
    """Whether the launcher, or torch, gives this environment variable a value for each rank, or for each cycle."""
    return name in _VARIABLES or name.startswith("TORCHELASTIC_")


def tells_ranks_apart(name: str) -> bool:
    """Whether a script that uses this variable may behave differently by rank or cycle from there on."""
    return is_set_for_ranks(name) or name.startswith("FT_")


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that are set for each rank."""
    return {name: value for name, value in environment.items() if not is_set_for_ranks(name)}


def shared_environment(environments: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
    """What ranks have in common, without the variables that are set for each; None if they differ in more."""
    first, *others = map(without_ranks, environments)
    return first if all(env == first for env in others) else None
