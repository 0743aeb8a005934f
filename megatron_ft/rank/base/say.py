"""Lines for the user, from rank 0 only, those that would come again and again only once."""

from __future__ import annotations

import sys
from typing import TextIO

from megatron_ft.rank.base import agreement

__all__ = ["forget", "once", "print_rank_0", "warn"]

_said: set[str] = set()


def print_rank_0(text: str, file: TextIO | None = None) -> None:
    """Print a line, on rank 0 only."""
    if agreement.rank() == 0:
        print(text, file=file, flush=True)


def once(text: str) -> None:
    """A line on stdout, once in a run."""
    _once(text, f"FT: {text}", sys.stdout)


def warn(text: str) -> None:
    """A warning on stderr, once in a run."""
    _once(text, f"FT: WARNING: {text}", sys.stderr)


def forget() -> None:
    """A new run begins: everything may be said again."""
    _said.clear()


def _once(text: str, line: str, file: TextIO) -> None:
    if text not in _said:
        _said.add(text)
        print_rank_0(line, file=file)
