"""Every line, and part of one, that the coordinator tells users, from facts. Pure.

The place of a node is its group rank; its name is that of its host, empty where that isn't known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_ft.job.rules.rotation import Rotation
from megatron_ft.link.base.wording import counted, listed

UNKNOWN_FAILURE = "a failure that was reported only to the lost coordinator"
LAUNCHER_ENDED = "its launcher exited"
RERUN_CONCLUDED = (
    "not restarting, because the checkpoint repeats this re-run: the rank's log says 'Possible persistent error' if "
    "the GPU is bad, else 'Correct result'; resume with --rerun-mode disabled, or from an earlier checkpoint"
)


# -- parts ----------------------------------------------------------------------------------------------------


def node(place: int, name: str) -> str:
    return f"node {place} ({name})" if name else f"node {place}"


def at(place: int, name: str, text: str) -> str:
    return f"{node(place, name)}: {text}"


def on(place: int, name: str, text: str) -> str:
    return f"on {node(place, name)} {text}"


def bad(place: int, name: str, state: str, text: str) -> str:
    return f"{node(place, name)} {'leaves the job' if state == 'excluded' else f'is {state}'}: {text}"


def joined(parts: Iterable[str]) -> str:
    return listed([*parts], joint="; ")


def without(cycle: int) -> str:
    return f"cycle {cycle} runs without it"


def reset(seconds: float) -> str:
    """Say why a node is lost whose connection was reset: its launcher may have exited, or not."""
    return f"its connection was reset, and its launcher hasn't connected again for {seconds:.1f} s"


def nobody_owns(endpoint: str, timeout: str, problems: str) -> str:
    return (
        f"no process was reached at {endpoint} for {timeout} ({problems}), and this launcher is not its host: "
        "start a launcher there, or set --rdzv-conf is_host=1 on one node"
    )


def silent(seconds: float) -> str:
    return f"no message from its launcher for {seconds:.1f} s"


def rotation(kind: Rotation) -> str:
    """Say who changes places in the next cycle, so that another GPU runs each rank; empty if nobody can."""
    match kind:
        case Rotation.RANKS:
            return "ranks are rotated by one within each node"
        case Rotation.NODES:
            return "nodes are rotated by one place"
    return "no rank can change places with it, so that the same GPU runs it again"


def no_evidence(nodes: Sequence[str]) -> str:
    """Say which nodes haven't told what their ranks do."""
    return f"no evidence from {listed(nodes)}"


# -- while a cycle runs, or nodes meet for one ----------------------------------------------------------------


def node_changed(*, cycle: int, told: str, good: int, min_nodes: int, has_store: bool) -> str:
    """Nodes aren't good any more, and the others go on. ``told``: which, as ``joined``.

    ``has_store``: the store of the ranks was on one that is gone.
    """
    store = "; the ranks' store is lost with node 0: they can't make new process groups until the next restart"
    return f"cycle {cycle}: {told}; continuing with {_good(good, min_nodes)}{store if has_store else ''}"


def lost_between(*, told: str, several: bool, are_enough: bool) -> str:
    """Nodes are missed while the others meet again. ``told``: which, as ``joined``; ``are_enough``: without them."""
    it = "them" if several else "it"
    follows = f"continue without {it}" if are_enough else f"are too few: waiting for {it} or a replacement"
    return f"{told}; the other nodes {follows}"


def waiting_for_nodes(
    *,
    here: Sequence[str],
    more: int,
    room: int = 0,
    last_call_s: float = 0.0,
    odd: int = 0,
    missing: Sequence[str] = (),
    lost: Sequence[str] = (),
    aside: Sequence[str] = (),
    cycle: int | None = None,
) -> str:
    """A round takes long.

    ``more`` nodes are needed (0: none, but there is ``room`` for some in the ``last_call_s`` seconds after the last
    one that was needed). Of the last cycle, ``cycle``, nodes are ``missing``
    that live, as far as is known, or ``lost``; those ``aside`` aren't fit, and take no part. Of those that are here,
    so many are ``odd``: not in a complete NVLink-domain segment.
    """
    parts = [
        f"{len(here)} {'of ' + str(len(here) + more - odd) + ' ' if more and not odd else ''}"
        f"{'is' if len(here) == 1 else 'are'} here"
    ]
    if here:
        parts[0] += f": {listed(here)}"
    if odd:
        parts.append(f"{odd} of them not in a complete NVLink-domain segment (--ft-segment)")
    if missing:
        parts.append(f"missing since cycle {cycle}: {listed(missing)}")
    if lost:
        parts.append(f"lost in cycle {cycle}: {listed(lost)}")
    if aside:
        parts.append(f"failing their health check: {listed(aside)}")
    if more:
        return f"waiting for {counted(more, 'more node')} ({'; '.join(parts)})"
    within = f"for at most {last_call_s:g} s (--rdzv-conf last_call_timeout)"
    return f"enough nodes to start; up to {room} more may join, {within} ({'; '.join(parts)})"


def waiting_for_others(*, cycle: int, others: int) -> str:
    return f"cycle {cycle}: all ranks of this node finished; waiting for {counted(others, 'other node')}"


def standing_by(running: int) -> str:
    nodes = "1 node runs" if running == 1 else f"{running} nodes run"
    return f"on standby for the next restart: {nodes} without this one"


def others_stand_by(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'node')} on standby for the next restart: {listed(names)}"


# -- why a cycle or the job ended -----------------------------------------------------------------------------


def too_few_healthy(*, good: int, min_nodes: int, told: str) -> str:
    """Why a cycle ended for all nodes. ``told``: which aren't, as ``joined``."""
    return f"{_good(good, min_nodes)}: {told}"


def nodes_waiting(count: int) -> str:
    return f"{counted(count, 'node')} waiting to join"


def no_progress(count: int, *, first: int, last: int) -> str:
    """Why a job isn't restarted that fails again and again: what was compared. -1: no iteration was reported."""
    beyond = f"none began an iteration after {last}" if last >= 0 else "none reported an iteration"
    resumed = f", resumed after {first}" if first >= 0 else ""
    return f"no progress in {counted(count, 'cycle')}, giving up ({beyond}{resumed} or completed a save)"


def failed_starts(count: int) -> str:
    """Why a job that has never trained isn't started again."""
    starts = "the start" if count == 1 else f"{count} starts in a row"
    return f"{starts} failed in this way before the first step, giving up"


def finished_without(*, finished: int, nodes: int, told: str) -> str:
    return f"the job finished on {finished} of {counted(nodes, 'node')}: {told}"


def did_not_come(more: int, *, seconds: float, aside: int) -> str:
    text = f"{counted(more, 'more node')} did not join within {seconds:g} s"
    if not aside:
        return text
    return f"{text}; {counted(aside, 'node')} failing the health check"


def another_job(theirs: str, own: str) -> str:
    return (
        f"another job already uses this rendezvous endpoint ({theirs}; this launcher's job is {own}): "
        "give each job its own --rdzv-endpoint, or all launchers of one job the same --rdzv-id"
    )


def not_proven(job: str) -> str:
    """Why a launcher on standby doesn't exit with 0 although the job that it waited for has finished."""
    return (
        f"{job} has finished without this launcher, and may have been another job: nothing was trained here. Give each "
        "job its own --rdzv-id (and endpoint), and the launchers of one job, spares included, the same"
    )


def other_options(differences: Sequence[tuple[str, str, str]]) -> str:
    """Why a launcher isn't let in: each option, what this launcher has, and what the others have."""
    told = "; ".join(f"{option} is {own} on this node, {others} on the others" for option, own, others in differences)
    return f"this launcher's options differ from those of the others: {told}"


def too_few_left(*, left: int, min_nodes: int) -> str:
    return f"{counted(left, 'node')} left, at least {min_nodes} required"


def gone_for_good(*, left: int, min_nodes: int, names: Sequence[str]) -> str:
    """Why the job ends: the scheduler starts no launcher again in place of lost ones."""
    told = f": {listed(names)}" if names else ""
    return f"{too_few_left(left=left, min_nodes=min_nodes)}; lost launchers are not restarted{told}"


def _good(good: int, min_nodes: int) -> str:
    return f"{counted(good, 'healthy node')}, at least {min_nodes} required"
