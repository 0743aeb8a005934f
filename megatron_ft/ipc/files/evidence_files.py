"""Evidence on disk: one JSON and one text for each rank that hung or died, under ``<log dir>/evidence``."""

from __future__ import annotations

import contextlib
import json
import os
import socket

from megatron_ft.core.diagnosis.evidence import Evidence, evidence_text

DIRECTORY = "evidence"
LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
"""Their frames are shown last, because they rarely are the cause: Python's, and ours."""


def write_evidence(log_dir: str, evidence: Evidence, *, suffix: str = "") -> str:
    """Write both files, readable for their owner only; a second one of the same rank and cycle replaces the first.

    Args:
        suffix: tells files on the same rank and cycle apart.

    Returns:
        The text's path, relative to the log directory.

    Raises:
        OSError: they can't be written.
    """
    path = os.path.join(log_dir, DIRECTORY)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    host = socket.gethostname()
    stem = f"rank{evidence.rank}-cycle{evidence.cycle}-{host}-{evidence.pid}{suffix}"
    # by its descriptor, and never through a link: the log directory may be one that others can write
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _write(folder, f"{stem}.json", json.dumps(evidence.packed(), indent=1) + "\n")
        _write(folder, f"{stem}.txt", evidence_text(evidence))
    finally:
        os.close(folder)
    return f"{DIRECTORY}/{stem}.txt"


def _write(folder: int, name: str, text: str) -> None:
    """A new file in place of whatever is there: to open that (a pipe, say) could wait for ever."""
    temporary = f".{os.getpid()}-{os.urandom(4).hex()}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # whatever ended it, an interrupt included, the temporary file has to go
        os.unlink(temporary, dir_fd=folder)
        raise
