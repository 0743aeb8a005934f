"""Evidence on disk: one JSON and one text for each rank that hung or died, under ``<log dir>/evidence``."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from megatron_ft.core.evidence_text import evidence_text

__all__ = ["DIRECTORY", "LIBRARIES", "write_evidence"]

DIRECTORY = "evidence"
LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Whose frames nobody wants to see first: Python's, and ours."""


def write_evidence(log_dir: str, document: Mapping[str, Any], *, suffix: str = "") -> str:
    """Write both files, readable for their owner only; a second one of the same rank and cycle replaces the first.

    Args:
        document: at least ``rank``, ``cycle`` and ``pid``.
        suffix: tells files on the same rank and cycle apart.

    Returns:
        The text's path, relative to the log directory.

    Raises:
        OSError: they can't be written.
    """
    os.makedirs(os.path.join(log_dir, DIRECTORY), mode=0o700, exist_ok=True)
    host = socket.gethostname()
    stem = f"{DIRECTORY}/rank{document['rank']}-cycle{document['cycle']}-{host}-{document['pid']}{suffix}"
    _write(os.path.join(log_dir, f"{stem}.json"), json.dumps(document, indent=1) + "\n")
    _write(os.path.join(log_dir, f"{stem}.txt"), evidence_text(document))
    return f"{stem}.txt"


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", errors="replace") as file:
        file.write(text)
