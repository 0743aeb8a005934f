"""Two ranks that reduce a small tensor again and again, by turns with and without the watch of their collectives.

Rank 0 writes the mean of each block, in microseconds, to the file that the argument names.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.rank.collectives import watch

BLOCKS = 16
BLOCK_S = 2.5
"""The watch looks several times a second."""


def block(tensor: torch.Tensor, count: int) -> float:
    """Microseconds of one, on average."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    return (time.perf_counter() - began) / count * 1e6


dist.init_process_group("gloo")
tensor = torch.ones(1024)
until = time.monotonic() + 30.0
while watch.current is None or watch.current.own_board is None:
    assert time.monotonic() < until, "it isn't watched"
    time.sleep(0.1)
watching: Any = watch.current
look = watching.look
took = torch.tensor(block(tensor, 2000))
dist.broadcast(took, src=0)
count = max(100, int(BLOCK_S * 1e6 / took.item()))
found: dict[str, list[float]] = {"watched": [], "unwatched": []}
for number in range(BLOCKS):
    is_watched = number % 4 in (0, 3)  # in an order in which a drift of the machine hits both alike
    watching.look = look if is_watched else lambda **_: None
    found["watched" if is_watched else "unwatched"].append(block(tensor, count))
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
