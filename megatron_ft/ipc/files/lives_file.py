"""``LOG_DIR/result.json``: the lives of a job, as launchers write them and scripts read them."""

from __future__ import annotations

import os

from megatron_ft.core.job.lives import Lives
from megatron_ft.ipc.files.own_files import read_own, read_regular, replace_own


def lives_path(log_dir: str) -> str:
    """Where the file is."""
    return os.path.join(log_dir, "result.json")


def read_lives_file(path: str) -> Lives:
    """Return the lives that are written there, by whichever user: for commands that show them.

    Raises:
        OSError: it can't be read; FileNotFoundError if no life has written it yet.
        ValueError: it isn't such a file, or of another version.
    """
    return Lives.parse(read_regular(path))


def read_own_lives_file(path: str) -> Lives:
    """Like `read_lives_file`, for a launcher, which acts on what other lives of its own user's job say.

    Raises:
        ForeignFileError: something else than a regular file of this user is there.
    """
    return Lives.parse(read_own(path))


def write_lives_file(path: str, lives: Lives) -> None:
    """Replace the file.

    Raises:
        ForeignFileError: something else than a regular file of this user is there, and stays.
        OSError: it can't be written.
    """
    replace_own(path, lives.to_text().encode(), fsync=True)
