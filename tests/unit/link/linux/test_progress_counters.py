"""What the kernel counts of a process that makes progress."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_ft.link.linux.proc import transferred_bytes


def test_bytes_that_are_read_and_written_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = transferred_bytes(os.getpid())[os.getpid()]
    path.write_bytes(bytes(1_000_000))
    written = transferred_bytes(os.getpid())[os.getpid()]
    assert written - before >= 1_000_000
    path.read_bytes()
    assert transferred_bytes(os.getpid())[os.getpid()] - written >= 1_000_000
