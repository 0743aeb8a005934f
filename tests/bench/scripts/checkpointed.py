"""A training that counts: ``python checkpointed.py ITERATIONS STEP_S SAVE_INTERVAL FILE``.

With the imports of a Megatron job; a small model, its gradients averaged over the ranks, the rest of an iteration is
sleep, so that a busy machine changes its pace little. Resumes from the last checkpoint.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
import megatron.core
import megatron.core.models.gpt  # noqa: F401
import torch
import torch.distributed as dist
from stamp import stamp, stamp_imported


def save(path: Path, state: dict[str, Any]) -> None:
    """Replaced whole: a rank that is killed in the middle leaves the one of before."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)


def main(iterations: int, step_s: float, save_interval: int, path: Path) -> None:
    """Until all iterations are done."""
    dist.init_process_group("gloo")
    stamp("group")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    done = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    due = time.monotonic()
    while done < iterations:
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        now = time.monotonic()
        due = max(due + step_s, now)
        time.sleep(due - now)
        done += 1
        stamp("step", done)
        if done % save_interval == 0:
            if dist.get_rank() == 0:
                save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done})
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    stamp_imported()
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
