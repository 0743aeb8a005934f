"""Every place where the launcher touches names that torch keeps to itself, with what is done where they differ.

Written for torch 2.13. ``missing_essentials`` says what the launcher can't do without; everything else falls
back to torch's own behaviour with one warning.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.elastic.agent.server.local_elastic_agent as _local_elastic_agent
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as _dynamic_rendezvous
import torch.distributed.launcher.api as _launcher_api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from megatron_ft.core.errors import ConfigError

__all__ = [
    "agent_made_by",
    "fresh_store",
    "leave_rendezvous",
    "missing_essentials",
    "nodes_in_rendezvous",
    "numa_bound_command",
    "quick_first_round",
    "rendezvous_backends",
    "say_nothing_of_death_signals",
    "shut_down_agent",
    "start_tail_logs",
    "store_port",
    "workers_started_by",
]

# names that torch doesn't export are looked up in these, unknown to the type checker
local_elastic_agent: Any = _local_elastic_agent
dynamic_rendezvous: Any = _dynamic_rendezvous
launcher_api: Any = _launcher_api

_LEAVE_S = 10.0
"""A rendezvous that doesn't answer for so long is left without a word."""
_AGENT_METHODS = (
    "_assign_worker_ranks",
    "_exit_barrier",
    "_initialize_workers",
    "_invoke_run",
    "_rendezvous",
    "_shutdown",
    "_start_workers",
    "_stop_workers",
)
_CONTEXT_METHODS = ("_close", "_poll", "_start", "close", "pids", "start")
_CONTEXT_ATTRIBUTES = ("_tail_logs", "args", "entrypoint", "envs", "error_files", "nprocs", "stderrs", "stdouts")
_AGENT_ATTRIBUTES = ("_pcontext", "_remaining_restarts", "_store", "_worker_group")


def missing_essentials() -> list[str]:
    """Names that the launcher needs and this torch doesn't have; empty for the versions it was made for."""
    missing = [f"LocalElasticAgent.{name}" for name in _AGENT_METHODS if not hasattr(LocalElasticAgent, name)]
    written = {name for cls in LocalElasticAgent.__mro__ for name in _names_in_init(cls)}
    missing += [f"LocalElasticAgent.{name}" for name in _AGENT_ATTRIBUTES if name not in written]
    written = _names_in_init(PContext)
    missing += [f"PContext.{name}" for name in _CONTEXT_ATTRIBUTES if name not in written]
    missing += [f"PContext.{name}" for name in _CONTEXT_METHODS if not hasattr(PContext, name)]
    for module, name in ((launcher_api, "LocalElasticAgent"), (local_elastic_agent, "start_processes")):
        if not hasattr(module, name):
            missing.append(f"{module.__name__}.{name}")
    return missing


@contextlib.contextmanager
def agent_made_by(
    factory: Callable[..., LocalElasticAgent], blocking: Callable[[Callable[[], Any]], Any]
) -> Iterator[None]:
    """Let ``launch_agent`` make its agent with ``factory``.

    Its rendezvous handler is made, and shut down, through ``blocking``: both may wait for other nodes.
    """
    registry = getattr(launcher_api, "rdzv_registry", None)
    original_agent = launcher_api.LocalElasticAgent
    launcher_api.LocalElasticAgent = factory
    if registry is not None:
        launcher_api.rdzv_registry = _PatientRegistry(registry, blocking)
    try:
        yield
    finally:
        launcher_api.LocalElasticAgent = original_agent
        if registry is not None:
            launcher_api.rdzv_registry = registry


class _PatientRegistry:
    """``rdzv_registry`` whose handlers are made and shut down in the background."""

    def __init__(self, registry: Any, blocking: Callable[[Callable[[], Any]], Any]) -> None:
        self._registry = registry
        self._blocking = blocking

    def get_rendezvous_handler(self, parameters: Any) -> Any:
        try:
            handler = self._blocking(lambda: self._registry.get_rendezvous_handler(parameters))
        except ValueError as error:
            raise ConfigError(f"rendezvous: {error}") from error
        shutdown = handler.shutdown
        handler.shutdown = lambda: self._blocking(shutdown)
        return handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)


def say_nothing_of_death_signals() -> None:
    """Drop torch's warning that it shuts workers down after a signal: it comes when they are gone, and we told."""
    logging.getLogger(LocalElasticAgent.__mro__[1].__module__).addFilter(
        lambda record: not record.getMessage().endswith("death signal, shutting down workers")
    )


@contextlib.contextmanager
def workers_started_by(start_processes: Callable[..., PContext]) -> Iterator[None]:
    """Let the agent start its ranks with ``start_processes``, called as torch's function of that name."""
    original = local_elastic_agent.start_processes
    local_elastic_agent.start_processes = start_processes
    try:
        yield
    finally:
        local_elastic_agent.start_processes = original


def start_tail_logs(context: PContext) -> None:
    """What ``PContext.start`` does after the ranks are started (before, it would take our signal handlers)."""
    for tail_log in context._tail_logs:
        tail_log.start()


def shut_down_agent(shutdown: Callable[..., None], death_signal: signal.Signals, timeout_s: float) -> None:
    """Call torch's ``_shutdown``, which takes a timeout only in newer versions."""
    if "timeout" in inspect.signature(shutdown).parameters:
        shutdown(death_signal, timeout_s)
    else:
        shutdown(death_signal)


def fresh_store(handler: Any, *, nodes: int) -> str | None:
    """Make the next round's ranks meet in a store without the last round's addresses. Call before each round.

    torch keeps one store for all rounds; ranks then read addresses of dead ranks and die of "connection
    refused", which costs another restart each time.

    Returns:
        A warning, if this torch has to be asked to do it in its own, slower way.
    """
    if isinstance(handler, dynamic_rendezvous.DynamicRendezvousHandler):
        if hasattr(handler, "_bootstrap_store_info") and hasattr(handler, "_shared_tcp_store_server"):
            handler._bootstrap_store_info = None
            handler._shared_tcp_store_server = None
            return None
        if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
            return None
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return f"torch {torch.__version__} keeps its rendezvous store elsewhere: rank 0 hosts a new one each cycle"
    # a static rendezvous of several nodes has one address for good, and nodes that come and go at their own time
    if isinstance(handler, StaticTCPRendezvous) and nodes == 1 and hasattr(handler, "_store"):
        handler._store = None
    return None


def leave_rendezvous(handler: Any) -> None:
    """Take this node out of the round, so that the next one needn't wait for it; the others may go on meeting."""
    exit_op = getattr(dynamic_rendezvous, "_RendezvousExitOp", None)
    if exit_op is not None and hasattr(handler, "_op_executor") and hasattr(handler, "_stop_heartbeats"):
        handler._stop_heartbeats()
        handler._op_executor.run(exit_op(), time.monotonic() + _LEAVE_S)


def nodes_in_rendezvous(handler: Any) -> int | None:
    """How many nodes take part in it or wait; None when it is closed."""
    if handler.is_closed():
        return None
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    groups = (getattr(state, name, ()) for name in ("participants", "wait_list", "redundancy_list"))
    return sum(map(len, groups))


def store_port(handler: Any) -> int | None:
    """The port of the rendezvous's store; None if it isn't reached through one, or this torch doesn't tell."""
    port = getattr(getattr(handler, "_store", None), "port", None)
    return port if isinstance(port, int) else None


@contextlib.contextmanager
def quick_first_round(*, nodes: int) -> Iterator[None]:
    """Leave out what a rendezvous of one node waits for: up to 0.3 s at random, meant to spread many nodes."""
    names = ("_delay", "get_method_name")
    if nodes != 1 or not all(hasattr(dynamic_rendezvous, name) for name in names):
        yield
        return
    originals = {name: getattr(dynamic_rendezvous, name) for name in names}
    dynamic_rendezvous._delay = _only_fixed_delays(originals["_delay"])
    # inspects the whole stack, sources included, for a word in an event that usually nobody records
    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dynamic_rendezvous, name, original)


def _only_fixed_delays(original: Callable[..., None]) -> Callable[..., None]:
    def delay(seconds: float | tuple[float, float]) -> None:
        if not isinstance(seconds, tuple):
            original(seconds=seconds)

    return delay


def rendezvous_backends() -> list[str]:
    """Names that ``--rdzv-backend`` may have; empty where this torch doesn't tell."""
    return list(getattr(rendezvous_handler_registry, "_registry", ()))


def numa_bound_command(argv: list[str], *, local_rank: int, numa_options: Any) -> list[str]:
    """The command of a rank, bound to its GPU's CPUs if ``--numa-binding`` asks for it.

    Raises:
        RuntimeError: this torch binds in another way.
    """
    if numa_options is None:
        return argv
    from torch.numa import binding

    wrap = getattr(binding, "_maybe_wrap_command_args_with_numa_binding", None)
    if wrap is None:
        raise RuntimeError(f"--numa-binding isn't possible with torch {torch.__version__}")
    return list(wrap(tuple(argv), gpu_index=local_rank, numa_options=numa_options))


def _names_in_init(cls: type) -> set[str]:
    code = getattr(cls.__dict__.get("__init__"), "__code__", None)
    return set() if code is None else set(code.co_names)
