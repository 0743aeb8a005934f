"""A job of integers, whose sum over all ranks is the same to the last bit however many ranks there are.

Arguments: the campaign's directory, and one for checkpoints and the final weights.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ft import RankMonitorClient
from tests.chaos.job import Rank

ITERATIONS, SAVE_INTERVAL, SAMPLES, STEP_S = 40, 4, 6, 0.12
directory, save = map(Path, sys.argv[1:])
notes, client = Rank(directory), RankMonitorClient()
client.init_workload_monitoring()
client.start_section("setup")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
last = max((int(path.stem) for path in save.glob("*.pt")), default=0)
weights = torch.load(save / f"{last}.pt") if last else torch.arange(64)
client.end_section("setup")
notes.note("began", iteration=last, world=world, pid=os.getpid())
for iteration in range(last, ITERATIONS):
    client.set_iteration(iteration)
    notes.note("step", iteration=iteration)
    client.start_section("step")
    total = sum((weights * (3 + each) + iteration * each) % 65_521 for each in range(rank, SAMPLES, world))
    dist.all_reduce(total)
    weights = (weights * 31 + total) % (2**31 - 1)
    time.sleep(STEP_S)
    while (directory / f"hang-{os.getpid()}").exists():
        time.sleep(1)
    client.end_section("step")
    if rank == 0 and (iteration + 1) % SAVE_INTERVAL == 0:
        torch.save(weights, save / "new")
        (save / "new").rename(save / f"{iteration + 1}.pt")
        notes.note("saved", iteration=iteration + 1)
if rank == 0:
    (save / "weights").write_text(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
client.shutdown_workload_monitoring()
dist.destroy_process_group()
