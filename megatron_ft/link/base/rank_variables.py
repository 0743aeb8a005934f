"""Environment variables that differ between ranks or cycles. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WATCH_VARIABLE = "FT_WATCH_COLLECTIVES"
"""Variable that says whether to watch a rank's collectives if its script calls no hooks: "on" or "off"."""
REFERENCE_NAMES_VARIABLE = "MEGATRON_FT_REFERENCE_NAMES"
"""Variable of a rank and its children: "on" where this package serves the names of nvidia-resiliency-ext."""
DIRECTORIES_VARIABLE = "FT_JOB_DIRECTORIES"
"""Variable of a launcher's health command: directories that the job writes to, separated by colons."""
KEEPER_SOCKET_VARIABLE = "FT_KEEPER_SOCKET"
"""Variable of a rank: the socket on which its node's keeper takes memory checkpoints."""
RESTORE_VARIABLE = "FT_MEMORY_RESTORE"
"""Variable of a rank: cycle and iteration of the memory checkpoint that its cycle restores; empty for none."""
ERROR_FILE_VARIABLE, OWN_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE", "FT_ERROR_FILE"
"""Variables of a rank for its error file. Another launcher that runs within the rank sets the first one anew."""
_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("FT_CYCLE", "FT_RANK_MONITOR_IPC_SOCKET", "FT_LAUNCHER_IPC_SOCKET", WATCH_VARIABLE),
        *(KEEPER_SOCKET_VARIABLE, RESTORE_VARIABLE, OWN_ERROR_FILE_VARIABLE),
        *("NVRX_CYCLE", "NVRX_LAUNCH_TIME", "NVRX_CYCLE_START_TIME", "NVRX_INFRA_RANK", "NVRX_MEMBERSHIP"),
    }
)


def wants_watch(environ: Mapping[str, str]) -> bool:
    """Return True if the launcher asks a rank with this environment to watch its collectives, and it isn't alone."""
    return is_the_rank(environ) and environ.get(WATCH_VARIABLE) == "on" and environ.get("WORLD_SIZE", "1") != "1"


def is_the_rank(environ: Mapping[str, str]) -> bool:
    """Return False in a process that another launcher (torchrun) has started within a rank."""
    own = environ.get(OWN_ERROR_FILE_VARIABLE)
    return own is None or environ.get(ERROR_FILE_VARIABLE, own) == own


def is_set_for_ranks(name: str) -> bool:
    """Return True if the launcher, or torch, sets this environment variable per rank or per cycle."""
    return name in _VARIABLES or name.startswith("TORCHELASTIC_")


def tells_ranks_apart(name: str) -> bool:
    """Return True if a module that uses this variable may differ between ranks or cycles."""
    return is_set_for_ranks(name) or name.startswith("FT_")


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that are set per rank."""
    return {name: value for name, value in environment.items() if not is_set_for_ranks(name)}


def shared_environment(environments: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
    """Return the common environment of ranks, without per-rank variables; None if they differ in others."""
    first, *others = map(without_ranks, environments)
    return first if all(env == first for env in others) else None
