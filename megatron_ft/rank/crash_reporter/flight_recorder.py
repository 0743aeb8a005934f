"""Unfinished collectives of this rank and their groups, from torch's flight recorder.

A thread of its own asks for them (see ``reporter``), only when a rank hangs. On GPU and CPU alike torch keeps the last
few thousand collectives (``TORCH_FR_BUFFER_SIZE``, 2000 by default; 0 turns the recorder off). The counts (``counts``)
are read more often; that takes some hundredths of a millisecond, however many collectives are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from megatron_ft.diagnosis.collectives import Collective, Collectives


class GroupCounts(NamedTuple):
    """Numbers of the last collectives of a process group. ``started``: on the GPU; None where that isn't seen."""

    entered: int
    completed: int
    started: int | None = None

    @property
    def is_in_one(self) -> bool:
        """True if one is under way: it waits for other ranks, or for the network."""
        return (self.entered if self.started is None else self.started) > self.completed


Counts = dict[str, GroupCounts]
"""By process group."""

_MAX_IN_FLIGHT = 20


def collectives() -> Collectives:
    """Return the unfinished collectives of this process's groups, or why they are unknown."""
    if "torch.distributed" not in sys.modules:
        return Collectives(error="torch.distributed isn't imported")
    try:
        import torch.distributed as dist

        if not dist.is_initialized():
            return Collectives(error="there is no process group")
        dumps = _dumps()
        if not dumps:
            return Collectives(error="this torch has no flight recorder")
        traces = [json.loads(dump(includeCollectives=True, onlyActive=False)) for dump in dumps]
        found = digest([entry for trace in traces for entry in trace.get("entries") or []])
        groups = _groups({each.group for each in found.in_flight})
        return replace(
            found, in_flight=tuple(replace(each, ranks=groups.get(each.group, ())) for each in found.in_flight)
        )
    except Exception as error:  # noqa: BLE001 - private parts of torch: whatever they raise, the rest of the evidence counts
        return Collectives(error=f"{type(error).__name__}: {error}")


def counts() -> Counts | None:
    """Return the counts of this process's groups; None if there is no group, or nothing is known.

    Torch counts a collective as completed once gloo's threads, or NCCL's watchdog (every tenth of a second), has seen
    its end. Point-to-point operations count in NCCL only. With the recorder off, the entered ones stand for both.
    """
    if "torch.distributed" not in sys.modules:
        return None
    found: Counts = {}
    try:
        import torch.distributed as dist

        if not dist.is_initialized():
            return None
        for recorder, dump in enumerate(_dumps()):
            for group, status in json.loads(dump(includeCollectives=False, onlyActive=False))["pg_status"].items():
                last = (int(status[f"last_{what}_collective"]) for what in ("enqueued", "completed", "started"))
                entered, completed, started = (max(0, number) for number in last)  # -1: none yet, or not seen
                found[f"{recorder}/{group}"] = GroupCounts(entered, completed, started or None)
        return found or _numbered()
    except Exception:  # noqa: BLE001 - private parts of torch: if they raise, collectives aren't watched here
        return None


def group_timeout_ns() -> int | None:
    """Return the timeout of the default process group; None if there is no group, or its timeout isn't known."""
    try:
        from torch.distributed import distributed_c10d

        group: Any = distributed_c10d._get_default_group()
        timeouts = [group._get_backend(device).options._timeout for device in group._device_types]
        return round(min(float(timeout.total_seconds()) for timeout in timeouts) * 1e9)
    except Exception:  # noqa: BLE001 - private parts of torch: if they raise, the launcher uses its own default
        return None


def _numbered() -> Counts | None:
    from torch.distributed import distributed_c10d

    found: Counts = {}
    groups: Any = distributed_c10d._world.pg_names
    for group, name in list(groups.items()):
        try:
            number = int(group._get_sequence_number_for_group())
        except RuntimeError:
            continue  # a backend that doesn't number them
        found[str(name)] = GroupCounts(number, number)
    return found or None


def _dumps() -> list[Any]:
    """Return torch's functions that dump its recorders: NCCL's on a GPU, and the one of all other backends."""
    from torch._C import _distributed_c10d as c10d

    return [getattr(c10d, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, name)]


def digest(entries: list[dict[str, Any]]) -> Collectives:
    """Build `Collectives` from the entries of torch's dumps, oldest first, without the ranks of groups. Pure."""
    enqueued: dict[str, int] = {}
    completed: dict[str, int] = {}
    last_done: dict[tuple[str, str], int] = {}
    for index, entry in enumerate(entries):
        backend, _, _ = str(entry.get("profiling_name", "")).rpartition(":")
        key = backend, str(entry["process_group"][0])
        if not entry.get("is_p2p"):
            name, seq = "/".join(key), int(entry["collective_seq_id"])
            enqueued[name] = max(enqueued.get(name, 0), seq)
            if _is_done(entry):
                completed[name] = max(completed.get(name, 0), seq)
        if _is_done(entry):
            last_done[key] = index
    active = []
    for index, entry in enumerate(entries):
        short = _short(entry)
        # parts of an NCCL batch are never retired, though the batch, which comes later, is
        is_part = short.p2p and short.backend == "nccl"
        if not _is_done(entry) and not (is_part and index < last_done.get((short.backend, short.group), -1)):
            active.append(short)
    return Collectives(in_flight=tuple(active[-_MAX_IN_FLIGHT:]), enqueued=enqueued, completed=completed)


def _is_done(entry: dict[str, Any]) -> bool:
    # gloo's finished collectives are retired, but keep the state "scheduled"
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _groups(wanted: Collection[str]) -> dict[str, Sequence[int]]:
    """Return the ranks of the ``wanted`` groups, by torch's names. A rank of a large job is in dozens of others."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world
    named = [(group, str(name)) for group, name in list(world.pg_names.items())]
    return {name: sorted(map(int, world.pg_group_ranks.get(group, {}))) for group, name in named if name in wanted}


def _short(entry: dict[str, Any]) -> Collective:
    """Return the part of a dump entry that other ranks need."""
    name, description = entry["process_group"][:2]
    is_p2p = bool(entry.get("is_p2p"))
    backend, _, op = str(entry.get("profiling_name", "")).rpartition(":")
    return Collective(
        group=str(name),
        description="" if description == "undefined" else str(description),
        seq=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        op=op or "a collective",
        backend=backend,
        p2p=is_p2p,
    )
