"""What `train_gpt.py` says, and how it hears that it should end."""

from __future__ import annotations

import argparse
import hashlib
import signal
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state


def print_rank_0(message: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def print_rank_last(message: str) -> None:
    """For what only the last pipeline stage knows."""
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(message, flush=True)


def training_log(
    iteration: int,
    loss: float | None,
    grad_norm: float | None,
    seconds: float,
    optimizer: Any,
    args: argparse.Namespace,
) -> None:
    if loss is None:
        return
    print_rank_last(
        f" iteration {iteration:8d}/{args.train_iters:8d} |"
        f" consumed samples: {args.consumed_train_samples:12d} |"
        f" elapsed time per iteration (ms): {seconds * 1000:.1f} |"
        f" learning rate: {optimizer.param_groups[0]['lr']:.6E} |"
        f" global batch size: {args.global_batch_size:5d} |"
        f" lm loss: {loss:.6E} |"
        f" grad norm: {grad_norm or 0.0:.3f} |"
    )


def print_weights_hash(model: Any, args: argparse.Namespace) -> None:
    """One hash over the weights of all ranks, in an order that depends on nothing but the layout. A collective."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.module.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    everywhere: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(everywhere, (place, digest.hexdigest()))
    shards = "".join(digest for (_, _, dp_rank), digest in sorted(everywhere) if dp_rank == 0)
    combined = hashlib.sha256(shards.encode()).hexdigest()
    print_rank_0(f"final weights sha256: {combined}")
    if args.hash_file and args.rank == 0:
        Path(args.hash_file).write_text(combined + "\n")


class ExitSignal:
    """Whether any rank was asked to end by SIGTERM; all ranks get the same answer, at the same iteration."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._received = False
        self.is_agreed = False
        """All ranks know by now."""
        if enabled:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_args: Any) -> None:
        self._received = True

    def seen_by_any_rank(self) -> bool:
        """A collective, until the answer is yes."""
        if not self._enabled or self.is_agreed:
            return self.is_agreed
        seen = torch.tensor([int(self._received)], device=torch.cuda.current_device())
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        self.is_agreed = bool(seen.item())
        return self.is_agreed
