"""A training that goes on until it is ended: ``python checkpointed.py STEP_S FILE_EVERY MEMORY_EVERY DIRECTORY``.

With the imports of a Megatron job; a small model, its gradients averaged over the ranks, the rest of an iteration is
sleep, so that a busy machine changes its pace little. The state goes to a file every so many iterations, and to memory
(0: never). SIGUSR1 makes a rank stand still; a file ``slow-RANK`` makes its next process start so many seconds later.
"""

# ruff: noqa: E402

from __future__ import annotations

import contextlib
import datetime
import os
import signal
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
from stamping import stamp

hangs: list[int] = []


def save(path: Path, state: dict[str, Any]) -> None:
    """Replaced whole: a rank that is killed in the middle leaves the one of before."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    os.replace(new, path)


def client() -> Any:
    """Heartbeats for a launcher that watches them; both peers serve this name."""
    if os.environ["FT_BENCH_HEARTBEATS"] != "1":
        return None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    made = RankMonitorClient()
    made.init_workload_monitoring()
    return made


def start_slowly(directory: Path, rank: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        seconds = float((directory / f"slow-{rank}").read_text())
        (directory / f"slow-{rank}").unlink()
        time.sleep(seconds)


def restored(path: Path, state: dict[str, Any], *, from_memory: bool) -> int:
    """Put what was kept into the state; return the iterations that are done."""
    loaded = torch.load(path, weights_only=True) if path.exists() else None
    done = 0 if loaded is None else int(loaded["done"])
    if from_memory:
        from megatron_ft import memory_checkpoint

        newer = memory_checkpoint.restore(state, newer_than=done)
        if newer is not None:
            return newer
    if loaded is not None:
        state.update(loaded)
    return done


def main(step_s: float, file_every: int, memory_every: int, directory: Path) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: hangs.append(1))
    rank = int(os.environ["RANK"])
    start_slowly(directory, rank)
    monitor = client()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(os.environ["FT_BENCH_GROUP_TIMEOUT"])))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    path = directory / "checkpoint.pt"
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    done = restored(path, state, from_memory=memory_every > 0)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    due = time.monotonic()
    while True:
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
        if monitor is not None:
            monitor.send_heartbeat()
        while hangs:
            time.sleep(1)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
        if memory_every:
            from megatron_ft import memory_checkpoint

            memory_checkpoint.save(done, state, every=memory_every)
        if done % file_every == 0:
            if rank == 0:
                save(path, state)
            dist.barrier()


if __name__ == "__main__":
    stamp("user")
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
