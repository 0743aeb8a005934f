"""Where the Lightning callbacks keep learned timeouts between runs.

The file is ``ft_state.json``'s document (megatron_ft.core.timeouts.ft_state_document), and beside it, under
"current_timeouts", the client's plain state: what nvidia-resiliency-ext's callbacks wrote, and what reads theirs.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from megatron_ft.core.timeouts.ft_state_document import to_document
from megatron_ft.ipc.files.state_file import write_state
from megatron_ft.rank.base import agreement
from megatron_ft.rank.client.client import RankMonitorClient
from megatron_ft.rank.hooks import learning

__all__ = ["directory_of", "is_versioned", "save"]


def directory_of(trainer: Any, folder: str) -> Path:
    """The directory where a trainer's callback keeps its file if it is given none. A collective (one broadcast)."""
    return Path(trainer.log_dir or trainer.default_root_dir) / folder


def is_versioned(directory: Path) -> bool:
    """Whether Lightning's loggers number this directory: the next run has another one and finds nothing."""
    return re.fullmatch(r"version_\d+", directory.parent.name) is not None


def save(client: RankMonitorClient, path: Path) -> None:
    """Write the client's calculated timeouts to the file. Only rank 0 may call this.

    Raises:
        OSError: it can't be written.
    """
    state = learning.state_of(client, str(path), written_at_unix_s=time.time(), world_size=agreement.world_size())
    write_state(str(path), {**to_document(state), **client.state_dict()})
