"""An unmodified script under gloo: it calls nothing of megatron_ft. In each cycle one rank keeps the others waiting.

The argument is a JSON list of {kind, rank, iteration, seconds}, one for each cycle; others run to their end.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

ITERATIONS = 12


class Hanging(Dataset[int]):
    """Whose files nobody answers for."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(1000)
        return index


def fault_skip(seconds: float) -> None:
    """The others are in an all_reduce that this rank has left out."""
    dist.barrier()


def fault_sleep(seconds: float) -> None:
    time.sleep(seconds)


def fault_loader(seconds: float) -> None:
    next(iter(DataLoader(Hanging(), num_workers=1)))


def computes(seconds: float) -> None:
    """All ranks do, for long, and nobody waits."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        torch.ones(200, 200) @ torch.ones(200, 200)


dist.init_process_group("gloo")
faults, cycle = json.loads(sys.argv[1]), int(os.environ["FT_CYCLE"])
fault = faults[cycle] if cycle < len(faults) else {"iteration": -1}
for iteration in range(ITERATIONS):
    if iteration == fault["iteration"]:
        if fault["kind"] == "computes":
            computes(fault["seconds"])
        elif dist.get_rank() == fault["rank"]:
            globals()[f"fault_{fault['kind']}"](fault["seconds"])
    dist.all_reduce(torch.ones(4))
    dist.barrier()
dist.destroy_process_group()
