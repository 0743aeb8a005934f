"""Every module that has a ``main`` does what it says when it is run with ``python -m``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megatron_ft

PACKAGE = Path(megatron_ft.__file__).parent


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("words", [("megatron_ft",), ("megatron_ft.cli.main",)])
def test_megatron_ft(words: tuple[str, ...]) -> None:
    done = run(*words, "--help")
    assert done.returncode == 0
    assert "usage: megatron-ft" in done.stdout
    assert " launch " in done.stdout


@pytest.mark.parametrize(
    "words", [("megatron_ft.launcher",), ("megatron_ft.launcher.main",), ("megatron_ft", "launch")], ids=" ".join
)
def test_ft_launcher(words: tuple[str, ...]) -> None:
    done = run(*words, "--no-such-option", "x.py")
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert done.stderr.startswith("ft_launcher: error:"), done.stderr


def test_no_module_with_a_main_does_nothing() -> None:
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    silent = [
        path
        for path, text in texts.items()
        if "\ndef main(" in text and '__name__ == "__main__"' not in text and path.name != "stacks.py"
    ]
    assert silent == []
