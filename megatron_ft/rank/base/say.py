"""Lines for the user through the logger megatron_ft.rank, of rank 0 unless the name says otherwise; once in a run."""

from __future__ import annotations

import functools
import os

from megatron_ft.link.log import INFO, NOTICE, RANK, WARNING
from megatron_ft.rank.base import agreement

_said: set[str] = set()


def _of_rank_0(level: int, text: str) -> None:
    if agreement.rank() == 0:
        RANK.say(level, text)


info = functools.partial(_of_rank_0, INFO)
"""Print a line on stdout."""
note = functools.partial(_of_rank_0, NOTICE)
"""Print a line on stderr."""


def warn(text: str) -> None:
    """Print a warning on stderr, once in a run."""
    if text not in _said:
        _said.add(text)
        _of_rank_0(WARNING, f"WARNING: {text}")


def warn_of_node(text: str) -> None:
    """Print a warning of this node on stderr, once in a run, if this is its first rank."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warn_of_rank(text)


def warn_of_rank(text: str) -> None:
    """Print a warning of this rank on stderr, once in a run."""
    if text not in _said:
        _said.add(text)
        RANK.say(WARNING, f"WARNING: rank {agreement.rank()}: {text}")


def forget() -> None:
    """Begin a new run: every line may be printed again."""
    _said.clear()
