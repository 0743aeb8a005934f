"""NVRX_GPUS_PER_NUMA: each rank is bound to the NUMA node of its GPU, by numactl."""

from __future__ import annotations

import os
import shutil

from megatron_ft.core.errors import ConfigError, show

VARIABLE = "NVRX_GPUS_PER_NUMA"


def variable() -> int | None:
    """Return the number of GPUs on each NUMA node; None: ranks aren't bound.

    Raises:
        ConfigError: the value is invalid.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{VARIABLE}={show(text)}: must be a whole number of GPUs, at least 1")
    return int(text)


def check() -> None:
    """Check the setting before any rank starts.

    Raises:
        ConfigError: ranks are to be bound, and can't be.
    """
    if variable() is not None and shutil.which("numactl") is None:
        raise ConfigError(f"{VARIABLE} needs the command numactl, which isn't installed here")


def prefix(local_rank: int, *, strict: bool) -> list[str]:
    """Return the prefix of a rank's command; ``strict``: memory of that node only."""
    per_node = variable()
    if per_node is None:
        return []
    node = str(local_rank // per_node)
    return ["numactl", f"--cpunodebind={node}", f"--membind={node}" if strict else "--localalloc"]
