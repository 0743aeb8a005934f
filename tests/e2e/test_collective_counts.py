"""What torch counts of the collectives of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_counts_move_with_collectives_and_end_with_the_group(tmp_path: Path) -> None:
    """The recorder is turned off: torch numbers them all the same."""
    code = f"""
import time, torch, torch.distributed as dist
from megatron_ft.rank.crash_reporter.flight_recorder import counts
print(counts())
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
for _ in range(2):
    dist.all_reduce(torch.ones(1))
    while any(each.is_in_one for each in counts().values()):
        time.sleep(0.001)  # a thread of torch's notes the completion
    print(sum(each.entered + each.completed for each in counts().values()))
dist.destroy_process_group()
print(counts())
"""
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, timeout=60)
    before, first, second, after = done.stdout.split()
    assert (before, after) == ("None", "None")
    assert int(second) == int(first) + 2, "entered, and completed"
