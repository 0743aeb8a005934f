"""A script under gloo whose ranks compute for a while, and then reduce: the argument is JSON.

Rank `slow` takes `factor` times as long as the others; `jitter` is the standard deviation of a step, as a share of it.
It ends with a file `end` in its directory, or after so many `seconds`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

import torch
import torch.distributed as dist

pace = json.loads(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
chance = random.Random(1000 * pace["seed"] + rank)
step_s = pace["step_s"] * (pace["factor"] if rank == pace["slow"] else 1.0)
gradients, goes_on = torch.ones(1000), torch.ones(1)
end_s = time.monotonic() + pace["seconds"]
while goes_on.item():
    time.sleep(step_s * max(0.2, chance.gauss(1.0, pace["jitter"])))
    dist.all_reduce(gradients)
    goes_on.fill_(time.monotonic() < end_s and not os.path.exists("end"))
    dist.broadcast(goes_on, 0)
