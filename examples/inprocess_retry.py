"""Recovery inside the process, beside the launcher: the ranks that are left go on, without a restart of anything.

    ft_launcher --nnodes 2:3 --nproc-per-node 1 --restart-policy min-healthy --rdzv-backend c10d \
        --rdzv-endpoint HOST:29500 --ft-rank-section-timeouts setup:60,step:60,checkpointing:60 \
        examples/inprocess_retry.py --save /tmp/retry

Started on three nodes. When a rank dies, the others' collectives fail. Each of them leaves its process group, finds
those that are left through the store that node 0's launcher keeps, and trains on with them in the same process: a
second `setup` and new ranks, but the weights it had. The launchers restart everything only when fewer than two nodes
are left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ft import fault_tolerance as ft

MOST_ATTEMPTS = 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A retry loop inside the ranks; start it with ft_launcher.")
    parser.add_argument("--save", required=True, metavar="DIR", help="ft_state.json goes here")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--settle", type=float, default=3.0, metavar="SECONDS", help="to wait for others that are left")
    parser.add_argument("--die", default="", metavar="RANK:ITERATION", help="that rank kills itself there")
    return parser.parse_args()


def who_is_left(store: dist.Store, attempt: int, rank: int, settle_s: float) -> list[int]:
    """The ranks of this attempt, the same list on all of them: the first one to wait long enough fixes it."""
    names = [f"{attempt}/{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    store.set(names[rank], "here")
    deadline = time.monotonic() + (settle_s if attempt else 3600)  # at first all of them come
    while time.monotonic() < deadline and not all(store.check([name]) for name in names):
        time.sleep(0.05)
    here = [other for other, name in enumerate(names) if store.check([name])]
    return list(json.loads(store.compare_set(f"{attempt}/ranks", "", json.dumps(here))))


def train(args: argparse.Namespace, attempt: int, weights: torch.Tensor, progress: torch.Tensor) -> None:
    """From where the new rank 0 stands; ``weights`` and ``progress`` change in place, together."""
    config = ft.LoopConfig(
        checkpoint=ft.CheckpointConfig(save=args.save), ft=ft.FaultToleranceSettings(calc_ft_timeouts=False)
    )
    state = ft.GlobalState(cfg=config, train_state=ft.TrainState())
    try:
        ft.setup(config, state)
        # a rank that is one step ahead of the others goes back to what all will have
        dist.broadcast(weights, src=0)
        dist.broadcast(progress, src=0)
        while int(progress) < args.iterations:
            state.train_state.step = int(progress)
            ft.on_training_step_start(state)
            if args.die == f"{os.environ['RANK']}:{int(progress)}" and attempt == 0:
                print(f"simulated: rank {os.environ['RANK']} kills itself", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            gradient = (weights - 1.0) / dist.get_world_size()
            dist.all_reduce(gradient)  # fails when a rank is gone
            weights -= 0.1 * gradient
            progress += 1
            time.sleep(0.02)  # stands for a real step's work
            ft.on_training_step_end(state)
        ft.shutdown(state)
    except RuntimeError:
        ft.abort(state)  # this rank isn't watched until the next setup; no collective, for some ranks are gone
        raise


def main() -> None:
    args = parse_args()
    rank = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: dist.Store = dist.TCPStore(address, port, is_master=False)  # node 0's launcher's; it outlives the ranks
    store = dist.PrefixStore(f"retry/{os.environ['FT_CYCLE']}", store)
    weights, progress = torch.zeros(4), torch.zeros(1, dtype=torch.int64)
    for attempt in range(MOST_ATTEMPTS):
        ranks = who_is_left(store, attempt, rank, args.settle)
        if rank not in ranks:
            raise SystemExit(f"rank {rank} came too late for attempt {attempt}")
        print(f"attempt {attempt}: rank {rank} is {ranks.index(rank)} of {len(ranks)}, pid {os.getpid()}", flush=True)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"group/{attempt}", store),
                rank=ranks.index(rank),
                world_size=len(ranks),
                timeout=timedelta(seconds=30),
            )
            train(args, attempt, weights, progress)
        except RuntimeError as error:
            print(f"attempt {attempt} failed on rank {rank} at iteration {int(progress)}: {error}", flush=True)
        else:
            print(f"finished at iteration {int(progress)}, weight {weights[0].item():.6f}", flush=True)
            return
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    raise SystemExit("no attempts left")


if __name__ == "__main__":
    main()
