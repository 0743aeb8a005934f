"""``FAULT_TOL_FINISHED_FLAG_FILE``: flag that the training is finished, and no further job is to be started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_ft.link.files.atomic_write import write_whole
from megatron_ft.rank.base import agreement, say

FINISHED_FLAG = "FAULT_TOL_FINISHED_FLAG_FILE"


def tell_if_finished(global_state: Any) -> None:
    """Write the flag on rank 0, at the end of a run, if the training has made its last iteration."""
    last = getattr(getattr(getattr(global_state, "cfg", None), "train", None), "train_iters", None)
    step = getattr(getattr(global_state, "train_state", None), "step", None)
    if not (type(last) is int and type(step) is int and 0 < last <= step) or agreement.rank() != 0:
        return
    reason = f"the training is finished: train_iters={last} is reached"
    try:
        path = write_flag(reason)
    except OSError as error:
        say.warn(f"{os.environ[FINISHED_FLAG]} can't be written ({error.strerror}): {reason}")
    else:
        if path is not None:
            say.info(f"{reason}, so {path} is written")


def write_flag(reason: str) -> str | None:
    """Write the reason to the file. Return its path, or None if the variable isn't set.

    Raises:
        OSError: the file can't be written.
    """
    path = os.environ.get(FINISHED_FLAG)
    if not path:
        return None
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{reason}\n", fsync=True)
    return path
