"""torch's private names that the launcher uses, and fallbacks where they differ.

Written for torch 2.13. ``missing_essentials`` lists what the launcher can't do without; everything else falls back to
torch's own behaviour with one warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.elastic.agent.server.local_elastic_agent as _local_elastic_agent
import torch.distributed.launcher.api as _launcher_api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext

# names that torch doesn't export are looked up in these, unknown to the type checker
local_elastic_agent: Any = _local_elastic_agent
launcher_api: Any = _launcher_api

_CPP_ERROR = 2

_METHODS: dict[type, tuple[str, ...]] = {
    LocalElasticAgent: ("_initialize_workers", "_invoke_run", "_rendezvous", "_shutdown", "_start_workers"),
    PContext: ("_close", "_poll", "_start", "close", "pids", "start"),
}
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    LocalElasticAgent: ("_pcontext", "_remaining_restarts", "_store", "_worker_group"),
    PContext: ("args", "entrypoint", "envs", "error_files", "nprocs", "stderrs", "stdouts"),
}
_TAIL_LOGS = (("_tail_logs",), ("_stdout_tail", "_stderr_tail"))
"""Attributes of a PContext that copy ranks' output: one list, and two of their own before torch 2.9."""


def missing_essentials() -> list[str]:
    """Return names that the launcher needs and this torch lacks; empty for the versions it was made for."""
    written = {cls: {name for each in cls.__mro__ for name in _names_in_init(each)} for cls in _ATTRIBUTES}
    missing = [f"{cls.__name__}.{name}" for cls, names in _METHODS.items() for name in names if not hasattr(cls, name)]
    for cls, names in _ATTRIBUTES.items():
        missing += [f"{cls.__name__}.{name}" for name in names if name not in written[cls]]
    if not any(written[PContext].issuperset(names) for names in _TAIL_LOGS):
        missing.append("PContext._tail_logs")
    for module, name in ((launcher_api, "LocalElasticAgent"), (local_elastic_agent, "start_processes")):
        if not hasattr(module, name):
            missing.append(f"{module.__name__}.{name}")
    return missing


def say_nothing_of_death_signals() -> None:
    """Drop torch's warning that it shuts workers down after a signal: it comes after the report of their end."""
    logging.getLogger(LocalElasticAgent.__mro__[1].__module__).addFilter(
        lambda record: not record.getMessage().endswith("death signal, shutting down workers")
    )


def warn_of_no_lost_connections() -> None:
    """Silence warnings of torch's C++ in this process.

    If the host of the store is lost, each connection to it prints a backtrace of twenty lines before the line that
    matters, which is ours. TORCH_CPP_LOG_LEVEL, if set by the user, is respected.
    """
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return
    with contextlib.suppress(OSError, ValueError):  # another torch, which prints them
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        level.value = max(level.value, _CPP_ERROR)


def tail_logs(context: PContext) -> list[Any]:
    """Return what copies the output of the context's ranks; each has ``start`` and ``stop``."""
    every, *each = (getattr(context, name, None) for names in _TAIL_LOGS for name in names)
    return list(every) if every is not None else [tail for tail in each if tail is not None]


@contextlib.contextmanager
def replaced(module: Any, name: str, by: object) -> Iterator[None]:
    """Have this module use ``by`` under that name meanwhile."""
    original = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, original)


def _names_in_init(cls: type) -> set[str]:
    code = getattr(cls.__dict__.get("__init__"), "__code__", None)
    return set() if code is None else set(code.co_names)
