"""The ready checks, and what else says whether this node is fit, as one command for ``/bin/sh``."""

from __future__ import annotations

import os
import shlex

from megatron_ft.ipc.config.resolved import ResolvedOptions
from megatron_ft.ipc.linux.isolated import isolated_command

__all__ = ["command"]


def command(options: ResolvedOptions, others: str | None, *, log_dir: str | None, ranks: int) -> str | None:
    """``others`` is what follows where ours have found nothing; None: nothing is to be checked."""
    parts = [ready(options, log_dir, ranks)] if options.node_health else []
    if others is not None:
        parts.append(others)
    return " || exit\n".join(parts) or None


def ready(options: ResolvedOptions, log_dir: str | None, ranks: int) -> str:
    """The directories are those that are known to be written to."""
    files = (options.checkpoint_iteration_file, os.environ.get("FAULT_TOL_FINISHED_FLAG_FILE"))
    directories = [log_dir, *(os.path.dirname(os.path.abspath(file)) for file in files if file)]
    words = [*isolated_command("megatron_ft.cli.node_health"), ",".join(options.node_health), f"--ranks={ranks}"]
    if options.node_health_timeout is not None:  # so that it can say what doesn't answer
        words.append(f"--bound={options.node_health_timeout * 0.8:g}")
    words += [f"--directory={each}" for each in dict.fromkeys(directories) if each]
    return shlex.join(words)
