"""Ranks of ``--run-path``: the command, and the pipe by which those of one node end together.

torchrun runs such a script as a function in a process that stays until the functions of all its node's ranks have
returned. A rank that exits at once may be taken down while threads of torch's process group still use the interpreter
("terminate called without an active exception"). The rank's side is ``rank/base/run_path.py``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

import megatron_ft

__all__ = ["command", "wait_for_each_other"]

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(megatron_ft.__file__)), "rank", "base", "run_path.py")
_RUN = (
    f"import sys; sys.path[:1] = {sys.path[:1]!r}; "  # the launcher's, as in the processes that torchrun spawns
    f"exec(compile(open({_PROGRAM!r}).read(), {_PROGRAM!r}, 'exec'))"
)
_VARIABLE = "MEGATRON_FT_RUN_PATH"


def command(script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command of a rank, which has its own process group, and ends with the launcher."""
    return [sys.executable, "-u", "-c", _RUN, script, *arguments]


@contextlib.contextmanager
def wait_for_each_other(commands: Sequence[Sequence[str]]) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Create variables and inherited descriptors by which ranks with these commands wait for each other.

    Both are empty if the ranks aren't of ``--run-path``.

    Raises:
        OSError: there is no descriptor left.
    """
    if not all(_RUN in words for words in commands):
        yield {}, ()
        return
    # a read returns once no rank has the write end open, dead ranks included
    ends = os.pipe()
    try:
        yield {_VARIABLE: ",".join(map(str, ends))}, ends
    finally:
        for end in ends:
            os.close(end)
