"""torch's dynamic rendezvous (c10d) by its public interface, for many nodes on loopback: a thread for each.

A script for `control`: it starts when a line comes, and says when the last of its nodes had met the others.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler


def _meet(
    endpoint: str, number: int, total: int, bound_s: int, met_s: list[float], kept: list[RendezvousHandler]
) -> None:
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=endpoint,
            run_id="bench",
            min_nodes=total,
            max_nodes=total,
            local_addr="127.0.0.1",
            is_host=number == 0,
            join_timeout=bound_s,
            read_timeout=bound_s,
        )
    )
    kept.append(handler)
    handler.next_rendezvous()
    met_s.append(time.monotonic())


def main() -> None:
    """Nodes ``first`` to ``last`` of ``total``."""
    endpoint, first, last, total, bound_s = sys.argv[1], *map(int, sys.argv[2:6])
    threading.stack_size(1 << 20)
    print(json.dumps({"ready": last - first}), flush=True)
    sys.stdin.readline()
    met_s: list[float] = []
    kept: list[RendezvousHandler] = []
    deadline_s = time.monotonic() + bound_s
    threads = [
        threading.Thread(target=_meet, args=(endpoint, number, total, bound_s, met_s, kept), daemon=True)
        for number in range(first, last)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    print(json.dumps({"last_s": max(met_s) if len(met_s) == last - first else None}), flush=True)
    sys.stdin.readline()  # the store is served here, until all have met
    os._exit(0)


if __name__ == "__main__":
    main()
