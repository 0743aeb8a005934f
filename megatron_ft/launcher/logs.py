"""What the launcher reads and makes under its log directories: it waits for a file server with a bound only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from megatron_ft.ipc.file_thread import FileThread

__all__ = ["call", "prompt"]

_READ_S = 0.2
_MAKE_S = 5.0
"""A server that merely is slow, with all nodes of a job asking at once, makes a few directories in that time."""

T = TypeVar("T")
_files = FileThread()


def call(job: Callable[[], T], default: T, *, bound_s: float = _READ_S) -> T:
    """Do something with files; the default if that takes too long, or an earlier one still does.

    Raises:
        whatever the job raises.
    """
    return _files.call(job, default, bound_s=bound_s)


def prompt(arguments: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The arguments of torch's ``start_processes``, with ``logs_specs`` whose directories keep nobody waiting."""
    return {**arguments, "logs_specs": _PromptLogs(arguments["logs_specs"], say)}


class _PromptLogs:
    """torch's places for the ranks' output. Where they can't be had in time, the ranks start without them."""

    def __init__(self, specs: LogsSpecs, say: Callable[[str], None]) -> None:
        self._specs = specs
        self._say = say

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See ``LogsSpecs``; what it adds to the environments isn't added by one that comes too late."""
        made = call(lambda: self._made({rank: dict(env) for rank, env in envs.items()}), None, bound_s=_MAKE_S)
        if made is None:
            self._say("the log directory doesn't answer: the ranks write to the launcher's output, and no error files")
            return _nowhere(len(envs))
        dest, changed = made
        for rank, env in envs.items():
            env.update(changed[rank])
        return dest

    def _made(self, envs: dict[int, dict[str, str]]) -> tuple[LogsDest, Mapping[int, dict[str, str]]]:
        return self._specs.reify(envs), envs


def _nowhere(ranks: int) -> LogsDest:
    streams = dict.fromkeys(range(ranks), "")
    dest = LogsDest(stdouts=streams, stderrs=dict(streams), error_files=dict.fromkeys(range(ranks), os.devnull))
    for name in {"filtered_stdout", "filtered_stderr"} & vars(dest).keys():  # of newer versions, and always opened
        setattr(dest, name, os.devnull)
    return dest
