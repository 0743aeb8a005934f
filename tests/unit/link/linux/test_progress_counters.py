"""What the kernel counts of a process that makes progress."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron_ft.link.linux.proc import scheduled_ns, transferred_bytes


def test_bytes_that_are_read_and_written_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = transferred_bytes(os.getpid())[os.getpid()]
    path.write_bytes(bytes(1_000_000))
    written = transferred_bytes(os.getpid())[os.getpid()]
    assert written - before >= 1_000_000
    path.read_bytes()
    assert transferred_bytes(os.getpid())[os.getpid()] - written >= 1_000_000


def test_the_time_of_a_busy_main_thread_passes() -> None:
    before, until_s = scheduled_ns(os.getpid(), os.getpid())[0], time.thread_time() + 0.05
    while time.thread_time() < until_s:
        pass
    assert scheduled_ns(os.getpid(), os.getpid())[0] - before >= 40_000_000
