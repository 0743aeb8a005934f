"""The collectives of this rank that aren't over, from torch's flight recorder: which, and with whom.

It is asked by a thread of its own (see ``witness``), only when somebody hangs. On a GPU as on a CPU torch keeps the
last few thousand collectives by itself (``TORCH_FR_BUFFER_SIZE``, 2000 unless it is set; 0 is none).
"""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["collectives"]

_MAX_IN_FLIGHT = 20
_MAX_GROUPS = 300


def collectives() -> dict[str, Any]:
    """What the process groups of this process do.

    Returns:
        ``in_flight``: not over yet, the earliest first, of each {group, seq, op, p2p, sizes};
        ``enqueued``: group -> number of the last collective that this rank has entered;
        ``ranks``: group -> its global ranks. Groups are named alike on all their ranks.
        ``error``: in place of all these, why nothing can be told.
    """
    if "torch.distributed" not in sys.modules:
        return {"error": "torch.distributed isn't imported"}
    try:
        return _collectives()
    except Exception as error:  # noqa: BLE001 - private parts of torch: whatever they raise, the rest of the evidence counts
        return {"error": f"{type(error).__name__}: {error}"}


def _collectives() -> dict[str, Any]:
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    if not dist.is_initialized():
        return {"error": "there is no process group"}
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return {"error": "this torch has no flight recorder"}
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries") or []
    enqueued: dict[str, int] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            name = str(entry["process_group"][0])
            enqueued[name] = max(enqueued.get(name, 0), int(entry["collective_seq_id"]))
    # what gloo has finished is retired, and keeps the state "scheduled"
    active = [entry for entry in entries if not entry.get("retired") and entry.get("state") != "completed"]
    return {"in_flight": [_short(entry) for entry in active[:_MAX_IN_FLIGHT]], "enqueued": enqueued, "ranks": _groups()}


def _groups() -> dict[str, list[int]]:
    """The groups that this rank is in, by torch's name."""
    from torch.distributed import distributed_c10d

    names = distributed_c10d._world.pg_names
    members = distributed_c10d._world.pg_group_ranks
    found = {}
    for group, name in list(names.items())[:_MAX_GROUPS]:
        found[str(name)] = sorted(members.get(group, {}))
    return found


def _short(entry: dict[str, Any]) -> dict[str, Any]:
    """What another rank needs to know of one; the names of torch's dump shortened to ours."""
    name, description = entry["process_group"][:2]
    is_p2p = bool(entry.get("is_p2p"))
    return {
        "group": str(name),
        "description": "" if description == "undefined" else str(description),
        "seq": int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        "op": str(entry.get("profiling_name", "")).rpartition(":")[2] or "a collective",
        "p2p": is_p2p,
        "sizes": str(entry.get("input_sizes", ""))[:60],
    }
