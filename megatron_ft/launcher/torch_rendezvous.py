"""Every place where the launcher touches names of torch's rendezvous that torch keeps to itself.

Written for torch 2.13. Where they differ, the rendezvous works as torch makes it, with one warning. Static and
etcd rendezvous are left alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as _dynamic_rendezvous
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from megatron_ft.core import gathering
from megatron_ft.core.gathering import Seen, Verdict
from megatron_ft.core.membership import Waiting

__all__ = [
    "Pace",
    "address_of",
    "close",
    "fresh_store",
    "has_rounds",
    "join_timeout_s",
    "last_round",
    "leave_rendezvous",
    "nodes_in_rendezvous",
    "nodes_waiting",
    "quick_round",
    "rendezvous_backends",
    "shared_store",
    "slow_because",
    "store_port",
]

dynamic_rendezvous: Any = _dynamic_rendezvous

_LEAVE_S = 10.0
"""A rendezvous that doesn't answer for so long is left without a word."""
_JOIN_TIMEOUT_S = 600.0
_LONG_AGO = datetime.min.replace(tzinfo=timezone.utc)
_MODULE_NAMES = ("_delay", "get_method_name")
_HANDLER_NAMES = ("_state_holder", "_this_node")
_HOLDER_NAMES = ("_cache_duration", "_sanitize", "state", "sync")
_STATE_NAMES = ("complete", "deadline", "last_heartbeats", "participants", "round", "wait_list")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How often so many nodes may ask; ``ends_last_call`` and ``removes_dead`` say what isn't left to torch."""

    nodes: int
    ends_last_call: bool
    removes_dead: bool


def slow_because(handler: Any) -> str | None:
    """A warning, if this torch's rendezvous can't be made quicker; None if it can, or isn't to be."""
    if not isinstance(handler, dynamic_rendezvous.DynamicRendezvousHandler):
        return None
    missing = _missing(handler)
    if not missing:
        return None
    return (
        f"warning: torch {torch.__version__} has no {', '.join(missing)}: "
        "the nodes meet at torch's own pace, which can take up to a minute"
    )


def _missing(handler: Any) -> list[str]:
    holder = getattr(handler, "_state_holder", None)
    state = getattr(holder, "state", None)
    places = (
        ("dynamic_rendezvous", dynamic_rendezvous, _MODULE_NAMES),
        ("DynamicRendezvousHandler", handler, _HANDLER_NAMES),
        ("state holder", holder, _HOLDER_NAMES),
        ("rendezvous state", state, _STATE_NAMES),
    )
    return [f"{where}.{name}" for where, place, names in places for name in names if not hasattr(place, name)]


@contextlib.contextmanager
def quick_round(handler: Any, *, pace: Pace, look: Callable[[Seen], Verdict]) -> Iterator[None]:
    """While the nodes meet: no fixed delays, no stale state, and what ``look`` says about each state that was read.

    torch waits up to 0.3 s at random, 1 s between two looks, and believes what it read for another second; the
    state is then looked at by each node at its own time.
    """
    if not isinstance(handler, dynamic_rendezvous.DynamicRendezvousHandler) or _missing(handler):
        yield
        return
    holder = handler._state_holder
    originals = {name: getattr(dynamic_rendezvous, name) for name in _MODULE_NAMES}
    cache_duration, sync, started_s = holder._cache_duration, holder.sync, time.monotonic()

    def delay(seconds: float | tuple[float, float]) -> None:
        if isinstance(seconds, tuple):
            time.sleep(random.random() * gathering.first_delay_s(pace.nodes))
        else:
            # each at its own time, else they all ask in the same moment
            time.sleep((0.75 + random.random() / 2) * gathering.poll_delay_s(pace.nodes, time.monotonic() - started_s))

    failures = 0

    def look_and_sync() -> bool | None:
        nonlocal failures
        has_set: bool | None = sync()
        failures = failures + 1 if has_set is False else 0
        if failures:
            time.sleep(random.random() * gathering.contention_s(pace.nodes, failures))
            sync()  # only who acts on what is there now has a chance
        _apply(holder, look(_seen(handler)), pace)
        return has_set

    dynamic_rendezvous._delay = delay
    # inspects the whole stack, sources included, for a word in an event that usually nobody records
    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"
    holder._cache_duration = 0
    holder.sync = look_and_sync
    try:
        if getattr(holder.state, "round", 0) > 0:
            delay((0, 0.3))  # torch spreads the nodes in its first round only
        yield
    finally:
        del holder.sync
        holder._cache_duration = cache_duration
        for name, original in originals.items():
            setattr(dynamic_rendezvous, name, original)


def _seen(handler: Any) -> Seen:
    state = handler._state_holder.state
    return Seen(
        me=handler._this_node,
        round=state.round,
        complete=state.complete,
        participants=frozenset(state.participants),
        waiting=frozenset(state.wait_list),
        beats=dict(state.last_heartbeats),
    )


def _apply(holder: Any, verdict: Verdict, pace: Pace) -> None:
    """Change the state as it was read; torch writes it, if nobody has written another meanwhile."""
    state = holder.state
    if pace.removes_dead and verdict.dead:
        for node in verdict.dead:
            state.last_heartbeats[node] = _LONG_AGO
        holder._sanitize()
    if pace.ends_last_call and verdict.ends_last_call and state.deadline is not None:
        state.deadline = _LONG_AGO


def last_round(handler: Any) -> tuple[int, Mapping[Any, int]]:
    """The number of the round that was met last, and its nodes with their group ranks; no nodes where unknown."""
    if not isinstance(handler, dynamic_rendezvous.DynamicRendezvousHandler) or _missing(handler):
        return 0, {}
    state = handler._state_holder.state
    return state.round, dict(state.participants)


def has_rounds(handler: Any) -> bool:
    """Whether each of its rounds has a store of its own: torch's static one, for one node, has none."""
    return not isinstance(handler, StaticTCPRendezvous)


def address_of(node: Any) -> str:
    """The name by which a node takes part, as its host has it or ``--local-addr`` gives it."""
    return str(getattr(node, "addr", node))


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
    # with several nodes it isn't torch's any more: see ``static_rounds``
    if isinstance(handler, StaticTCPRendezvous) and nodes == 1 and hasattr(handler, "_store"):
        handler._store = None
    return None


def leave_rendezvous(handler: Any) -> None:
    """Take this node out of the round, so that the next one needn't wait for it; the others may go on meeting."""
    exit_op = getattr(dynamic_rendezvous, "_RendezvousExitOp", None)
    if exit_op is not None and hasattr(handler, "_op_executor") and hasattr(handler, "_stop_heartbeats"):
        handler._stop_heartbeats()
        handler._op_executor.run(exit_op(), time.monotonic() + _LEAVE_S)


def close(handler: Any) -> None:
    """End it for all nodes, also where ``shutdown`` was replaced because the others were to go on."""
    type(handler).shutdown(handler)


def nodes_in_rendezvous(handler: Any) -> int | None:
    """How many nodes take part in it or wait; None when it is closed."""
    if handler.is_closed():
        return None
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    groups = (getattr(state, name, ()) for name in ("participants", "wait_list", "redundancy_list"))
    return sum(map(len, groups))


def nodes_waiting(handler: Any, met: Collection[Any]) -> Waiting:
    """Who waits; ``met`` are the nodes of the round that was met last.

    Raises:
        RendezvousError: the host of the rendezvous is gone.
    """
    count = handler.num_nodes_waiting()
    if not isinstance(handler, dynamic_rendezvous.DynamicRendezvousHandler) or _missing(handler):
        return Waiting(unknown=count)
    state = handler._state_holder.state
    waiting, spare = frozenset(state.wait_list), frozenset(getattr(state, "redundancy_list", ()))
    members = frozenset(met)
    return Waiting(returning=waiting & members, joining=waiting - members, spare=spare - members)


def shared_store(handler: Any) -> Any:
    """The store that all rounds share; None if there is none, or this torch doesn't tell."""
    return (
        getattr(handler, "_store", None) if isinstance(handler, dynamic_rendezvous.DynamicRendezvousHandler) else None
    )


def join_timeout_s(handler: Any) -> float:
    """How long a round waits for nodes that it needs, in seconds."""
    timeout = getattr(getattr(handler, "settings", None), "timeout", None)
    join = getattr(timeout, "join", None)
    return _JOIN_TIMEOUT_S if join is None else float(join.total_seconds())


def store_port(handler: Any) -> int | None:
    """The port of the rendezvous's store; None if it isn't reached through one, or this torch doesn't tell."""
    port = getattr(getattr(handler, "_store", None), "port", None)
    return port if isinstance(port, int) else None


def rendezvous_backends() -> list[str]:
    """Names that ``--rdzv-backend`` may have; empty where this torch doesn't tell."""
    return list(getattr(rendezvous_handler_registry, "_registry", ()))
