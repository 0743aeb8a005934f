"""A plain training script for `launch.sh`: it saves, resumes, and says when there is nothing left to train.

    FAULT_TOL_FINISHED_FLAG_FILE=/tmp/run/finished examples/autoresume/launch.sh \
        ft_launcher --nproc-per-node 2 examples/autoresume/train.py --save /tmp/run
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ft import RankMonitorClient


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description="A plain training script that saves and resumes.")
    parser.add_argument("--save", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--train-iters", type=int, default=1000)
    parser.add_argument("--save-interval", type=int, default=50)
    return parser.parse_args()


def write_whole(path: Path, content: object) -> None:
    """Save so that a job killed meanwhile leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(content, temporary)
    temporary.replace(path)


def main() -> None:
    """Train from the last checkpoint, if there is one, to `--train-iters`."""
    args = parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    client = RankMonitorClient()
    client.init_workload_monitoring()

    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1, device=device)
    torch.manual_seed(1 + dist.get_rank())  # the same model, other data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoint, first = args.save / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iteration"]
    if dist.get_rank() == 0:
        args.save.mkdir(parents=True, exist_ok=True)
        print(f"training from iteration {first}", flush=True)

    for iteration in range(first, args.train_iters):
        client.set_iteration(iteration)
        client.send_heartbeat()
        features = torch.randn(16, 8, device=device)
        loss = (model(features) - features.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        done = iteration + 1
        if dist.get_rank() == 0 and (done % args.save_interval == 0 or done == args.train_iters):
            write_whole(
                checkpoint, {"iteration": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            )
            print(f"saved iteration {done}, loss {loss.item():.4f}", flush=True)

    # all ranks have come to the end, and the last checkpoint is there: only now is the training finished
    dist.barrier()
    if dist.get_rank() == 0 and (flag := os.environ.get("FAULT_TOL_FINISHED_FLAG_FILE")):
        Path(flag).write_text(f"the training is finished: {args.train_iters} iterations\n")
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
