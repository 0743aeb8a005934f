"""Every module that has a ``main`` does what it says when it is run with ``python -m``."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("words", [("megatron_ft",), ("megatron_ft.cli.main",)])
def test_megatron_ft_modules_print_their_usage(words: tuple[str, ...]) -> None:
    done = run(*words, "--help")
    assert done.returncode == 0
    assert "usage: megatron-ft" in done.stdout
    assert " launch " in done.stdout


@pytest.mark.parametrize("words", [("megatron_ft.launcher.main",), ("megatron_ft", "launch")], ids=" ".join)
def test_ft_launcher_modules_refuse_an_unknown_option(words: tuple[str, ...]) -> None:
    done = run(*words, "--no-such-option", "x.py")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert done.stderr.startswith("ft_launcher: error:"), done.stderr
