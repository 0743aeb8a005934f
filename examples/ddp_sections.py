"""A plain PyTorch DDP loop whose parts are sections, on CPU (gloo) or GPU (nccl).

    ft_launcher --nproc-per-node 2 --max-restarts 3 --ft-cfg-path megatron_ft/configs/sections.yaml \
        examples/ddp_sections.py --save /tmp/ddp

Each part has a timeout of its own: a hang in a step is noticed long before the time is over that a save may take. To
see it happen, add `--fault-plan megatron_ft/configs/faults/kill-then-hang.yaml`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_ft import RankMonitorClient
from megatron_ft.rank.faults.injection import FaultInjector

CUDA = torch.cuda.is_available()
SAVE_INTERVAL = 10


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DDP with sections; start it with ft_launcher.")
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="checkpoints go here")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--step-time", type=float, default=0.2, metavar="SECONDS", help="stands for a real step's work")
    parser.add_argument("--fault-plan", metavar="FILE", help="fail on purpose; see megatron_ft/configs/faults/")
    return parser.parse_args()


def build(device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1234)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def batch(iteration: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's data of one iteration: from the numbers alone, so that a resumed run sees what it would have seen."""
    generator = torch.Generator().manual_seed(iteration * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(32, 16, generator=generator)
    return inputs.to(device), inputs.sum(dim=1, keepdim=True).sin().to(device)


def save(path: Path, state: dict[str, Any]) -> None:
    """Beside it, and then renamed: a rank that dies while it saves leaves the checkpoint of before."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def main() -> None:
    args = parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    client = RankMonitorClient()
    client.init_workload_monitoring()
    injector = FaultInjector.of_this_rank(args.fault_plan, client=client)
    with client.section("init"):
        if CUDA:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if CUDA else "gloo")
        args.save.mkdir(parents=True, exist_ok=True)
        path = args.save / "sections.pt"
        model, optimizer = build(device)
        # "checkpoint" keeps its configured timeout: a busy file system may take far longer than any save was seen to.
        iteration, learnable = 0, ["step"]
        if path.exists():
            checkpoint = torch.load(path, map_location=device, weights_only=True)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            iteration = checkpoint["iteration"]
            # Timeouts that were calculated in an earlier cycle or run; the configured ones hold until there are some.
            client.load_state_dict(checkpoint["timeouts"])
            learnable = ["step", "init"]  # from a start without a load, "init" would be too short for one with
        ddp = DistributedDataParallel(model)

    while iteration < args.iterations:
        client.set_iteration(iteration)  # for the launcher's messages and the report; no timeout depends on it
        with client.section("step"):
            injector.on_iteration(iteration)
            inputs, targets = batch(iteration, device)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            time.sleep(args.step_time)
        iteration += 1
        if iteration % SAVE_INTERVAL == 0:
            # All ranks do this together, and all get the same timeouts. The time out of section keeps its configured
            # one: it must also cover what this run hasn't come to yet.
            client.calculate_and_set_section_timeouts(learnable, calc_out_of_section=False)
            with client.section("checkpoint"):
                if rank == 0:
                    print(f"iteration {iteration}: loss {loss.item():.6f}, {client.section_timeouts}", flush=True)
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
                    save(path, {**state, "timeouts": client.state_dict()})
    if rank == 0:
        total = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
        print(f"finished at iteration {iteration}, the weights sum up to {total:.12f}", flush=True)
    client.shutdown_workload_monitoring()  # from here on this rank isn't watched, however long the rest takes
    del ddp  # the last reference to a gloo group waits for its threads; the model would do so holding the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
