"""The part that all the small scripts share: a process group, and steps until somebody ends them."""

from __future__ import annotations

import time

from stamp import stamp

SLEEP_S = 0.02


def run() -> None:
    """Step until somebody ends it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    stamp("group")
    tensor = torch.ones(1024)
    number = 0
    while True:
        number += 1
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        time.sleep(SLEEP_S)
        stamp("step", number)
