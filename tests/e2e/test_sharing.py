"""What a process has that no fork of it may have, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, sys
from megatron_ft.rank.run_ahead.sharing import descriptors, identity, why_not_shared
said = os.dup(2)
own, given = {said, *descriptors(set())} - {0, 1, 2}, set(map(identity, (0, 1, 2)))
EVENT
os.write(said, str(why_not_shared(own, given)).encode())
"""


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ("", "None"),
        ("os.close(1)", "None"),
        ("os.dup2(2, 1)", "None"),
        ("os.dup2(os.open(os.devnull, os.O_RDWR), 1)", "None"),
        (
            "fd = os.open('file', os.O_RDWR | os.O_CREAT); os.dup2(fd, 1); os.close(fd)",
            "the script has {}/file open for writing",
        ),
        ("os.dup2(os.pipe()[0], 0)", "the script has pipe:"),
    ],
)
def test_standard_streams_are_shareable_but_for_files_and_pipes(tmp_path: Path, event: str, why: str) -> None:
    command = [sys.executable, "-c", _SCRIPT.replace("EVENT", event)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert found.stderr.startswith(why.format(tmp_path))
