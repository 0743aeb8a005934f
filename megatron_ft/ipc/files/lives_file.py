"""``LOG_DIR/result.json``: the lives of a job, as launchers write them and scripts read them."""

from __future__ import annotations

import os

from megatron_ft.core.job.lives import Lives


def lives_path(log_dir: str) -> str:
    """Where the file is."""
    return os.path.join(log_dir, "result.json")


def read_lives_file(path: str) -> Lives:
    """The lives that are written there.

    Raises:
        OSError: it can't be read; FileNotFoundError if no life has written it yet.
        ValueError: it isn't such a file, or of another version.
    """
    with open(path, "rb") as file:
        return Lives.parse(file.read())
