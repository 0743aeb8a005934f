"""What is run ahead, and which variables tell ranks and cycles apart. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_ft.core.errors import ConfigError

__all__ = ["FORK_SERVER_NAME", "RUN_AHEAD_VARIABLE", "parse_preload", "shared_environment", "tells_ranks_apart"]

FORK_SERVER_NAME = "ft_fork_server"
"""Of the process, as the kernel has it; what it forks has it, too, until it is a rank."""
RUN_AHEAD_VARIABLE = "MEGATRON_FT_RUN_AHEAD"
"""Carries a server's orders, and is gone before its script runs."""
_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    }
)
_PREFIXES = ("TORCHELASTIC_", "FT_")


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


def tells_ranks_apart(name: str) -> bool:
    """Whether an environment variable is the launcher's word to one rank, or to one cycle."""
    return name in _VARIABLES or name.startswith(_PREFIXES)


def shared_environment(environments: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
    """What ranks have in common, without the variables that tell them apart; None if they differ in more than those."""
    shared = [{n: v for n, v in env.items() if not tells_ranks_apart(n)} for env in environments]
    return shared[0] if all(env == shared[0] for env in shared) else None
