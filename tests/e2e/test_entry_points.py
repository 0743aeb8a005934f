"""Every module that has a ``main`` does what it says when it is run with ``python -m``."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("megatron_ft --help", 0, "usage: megatron-ft"),
        ("megatron_ft.launcher.main --no-such-option x.py", 2, "ft_launcher: error:"),
        ("megatron_ft launch --no-such-option x.py", 2, "ft_launcher: error:"),
    ],
)
def test_modules_run_by_python_are_their_commands(words: str, code: int, told: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words.split()], capture_output=True, text=True, timeout=60)
    assert (done.returncode, (done.stdout + done.stderr).startswith(told)) == (code, True), done.stderr
    assert (" launch " in done.stdout) == ("--help" in words)
