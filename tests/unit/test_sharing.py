"""What a process has that no fork of it may have, too."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import os, sys
from megatron_ft.rank.sharing import descriptors, standard_streams, why_not_shared
own, streams = {0, 1, 2} | descriptors(set()), standard_streams()
EVENT
os.write(2, str(why_not_shared(own, streams)).encode())
"""


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ("", "None"),
        ("os.close(1)", "it has closed or redirected a standard stream"),
        ("os.dup2(os.open(os.devnull, os.O_RDWR), 1)", "it has closed or redirected a standard stream"),
        ("kept = os.open(os.devnull, os.O_RDWR)", "None"),
    ],
)
def test_standard_streams(event: str, why: str) -> None:
    command = [sys.executable, "-c", _SCRIPT.replace("EVENT", event)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stderr == why
