"""``LOG_DIR/result.json``: the lives of a job, as launchers write them and scripts read them."""

from __future__ import annotations

import os

from megatron_ft.ipc.files.own_files import read_own, read_regular, replace_own
from megatron_ft.job.rules.lives import Lives


def lives_path(log_dir: str) -> str:
    return os.path.join(log_dir, "result.json")


def read_lives_file(path: str) -> Lives:
    """Return the lives in the file, written by whichever user: for commands that show them.

    Raises:
        OSError: the file can't be read; FileNotFoundError if no life has written it yet.
        ValueError: the file isn't a lives file, or of another version.
    """
    return Lives.parse(read_regular(path))


def read_own_lives_file(path: str) -> Lives:
    """Like `read_lives_file`, for a launcher, which acts on the lives of its own user's job.

    Raises:
        ForeignFileError: the path isn't a regular file of this user.
    """
    return Lives.parse(read_own(path))


def write_lives_file(path: str, lives: Lives) -> None:
    """Replace the file.

    Raises:
        ForeignFileError: the path isn't a regular file of this user; it stays.
        OSError: the file can't be written.
    """
    replace_own(path, lives.to_text().encode(), fsync=True)
