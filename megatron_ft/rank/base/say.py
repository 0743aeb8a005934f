"""Lines for the user, printed by rank 0 only; ``once`` and ``warn`` print each line once in a run."""

from __future__ import annotations

import sys
from typing import TextIO

from megatron_ft.rank.base import agreement

_said: set[str] = set()


def print_rank_0(text: str, file: TextIO | None = None) -> None:
    if agreement.rank() == 0:
        print(text, file=file, flush=True)


def once(text: str) -> None:
    """Print a line on stdout, once per run."""
    _once(text, f"FT: {text}", sys.stdout)


def warn(text: str) -> None:
    """Print a warning on stderr, once per run."""
    _once(text, f"FT: WARNING: {text}", sys.stderr)


def forget() -> None:
    """Begin a new run: every line may be printed again."""
    _said.clear()


def _once(text: str, line: str, file: TextIO) -> None:
    if text not in _said:
        _said.add(text)
        print_rank_0(line, file=file)
