"""The runs whose event logs are in some directories, for a command of a user's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_ft.cli.logs.read import read_directory
from megatron_ft.cli.logs.runs import RunLogs, split_runs
from megatron_ft.core.errors import ConfigError

__all__ = ["runs_in"]

_MOST_PROCESSES = 8


def runs_in(directories: Sequence[str]) -> list[RunLogs]:
    """Read them, oldest run first; a line on stderr if there are none. A directory named twice is read once.

    Raises:
        ConfigError: a directory can't be read.
    """
    logs = []
    for directory in dict.fromkeys(map(os.path.realpath, directories)):
        try:
            logs += read_directory(directory, processes=min(_MOST_PROCESSES, os.cpu_count() or 1))
        except OSError as error:
            raise ConfigError(f"{directory} can't be read: {error.strerror}") from None
    runs = split_runs(logs)
    if not runs:
        print(f"megatron-ft: no event logs in {', '.join(directories)}", file=sys.stderr)
    return runs
