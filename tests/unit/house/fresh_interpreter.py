"""A fresh interpreter: only it can tell what an import loads."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["output_of"]


def output_of(script: str, *arguments: str) -> str:
    """What the script writes to standard output, once it has ended well."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
