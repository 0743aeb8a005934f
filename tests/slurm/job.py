"""A training whose last weights tell whether anything was lost or done twice: quick, on the CPU, torch and gloo only.

It shows what a train loop has to do: hooks, checkpoints, a save on SIGTERM. The weights are whole numbers, and the same
whatever the number of ranks. With ``--hold N`` it waits before iteration
N until the file ``go-N`` is there, so that whatever is done to the job meets it at a known place. ``rank-R`` holds the
host of rank R, ``weights`` a digest of the last weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ft import RankMonitorClient, WorkloadAction, WorkloadControlRequest
from megatron_ft import fault_tolerance as ft

_SAMPLES = 12
_MODULUS = 2**31 - 1


def main() -> None:
    """Train from the last checkpoint on."""
    args = _parse()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    settings = ft.FaultToleranceSettings(enable_ft_package=True)
    state = ft.GlobalState.create(save=str(args.save), ft=settings, train_iters=args.iterations)
    ft.setup(state.cfg, state)
    (args.save / f"rank-{rank}").write_text(socket.gethostname())
    begin, weights = _load(args.save)
    if begin:
        ft.on_checkpoint_loaded(is_local_chkpt=False, global_state=state)
    iteration = begin
    while iteration < args.iterations:
        if iteration in args.hold and rank == 0:
            _hold(args.save, iteration, asked)
        state.train_state.step = iteration
        ft.on_training_step_start(state)
        if (rank, iteration) == (1, args.fails_at):
            raise ValueError("this batch can't be read")
        if (rank, iteration, os.environ["FT_CYCLE"]) == (1, args.excluded_at, "0"):
            _ask_to_be_left_out(state.rank_monitor_client)
        gradient = _gradient(weights, iteration, range(rank, _SAMPLES, dist.get_world_size()))
        dist.all_reduce(gradient)
        weights = (weights * 31 + gradient) % _MODULUS
        ft.on_training_step_end(state)
        iteration += 1
        is_asked = torch.tensor([len(asked)])
        dist.all_reduce(is_asked)
        if iteration % args.save_interval == 0 or is_asked or iteration == args.iterations:
            ft.on_checkpointing_start(state)
            _save(args.save, iteration, weights, rank)
            ft.on_checkpointing_end(is_async_finalization=False, global_state=state)
        if is_asked:
            break
    if iteration == args.iterations and rank == 0:
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        (args.save / "weights").write_text(digest)
    ft.shutdown(state)
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--save-interval", type=int, default=5)
    parser.add_argument("--hold", type=int, nargs="*", default=[])
    parser.add_argument("--fails-at", type=int, help="rank 1 fails at this iteration, always")
    parser.add_argument("--excluded-at", type=int, help="rank 1 asks for the exclusion of its node, in the first cycle")
    return parser.parse_args()


def _gradient(weights: torch.Tensor, iteration: int, samples: Iterable[int]) -> torch.Tensor:
    """Of these samples. Whole numbers: their sum is the same, however many ranks it is shared by."""
    seeds = torch.tensor([iteration * 7919 + sample * 104729 for sample in samples])
    return ((weights + seeds[:, None]) * 48271 % _MODULUS >> 8).sum(0)


def _hold(save: Path, iteration: int, asked: list[int]) -> None:
    (save / f"at-{iteration}").touch()
    while not asked and not (save / f"go-{iteration}").exists():
        time.sleep(0.05)


def _ask_to_be_left_out(client: RankMonitorClient) -> None:
    request = WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "its disk is broken")
    client.send_workload_control_request(request)
    time.sleep(600)


def _load(save: Path) -> tuple[int, torch.Tensor]:
    try:
        found = torch.load(save / "checkpoint")
    except FileNotFoundError:
        return 0, torch.arange(64)
    return int(found["iteration"]), found["weights"]


def _save(save: Path, iteration: int, weights: torch.Tensor, rank: int) -> None:
    if rank == 0:
        torch.save({"iteration": iteration, "weights": weights}, save / "new")
        os.replace(save / "new", save / "checkpoint")
    dist.barrier()


if __name__ == "__main__":
    main()
