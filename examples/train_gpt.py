"""Train a small GPT with megatron-core, in the shape of Megatron-LM's own training loop, under `ft_launcher`.

    ft_launcher --nproc-per-node 2 examples/train_gpt.py --save /tmp/gpt

The hooks of `megatron_ft.fault_tolerance` are called where Megatron-LM calls its own: around every training step,
every evaluation step, every save and every finalisation of an asynchronous save, after a load, and at the end.
It runs on CUDA, and, with `cpu_stand_in`, without it. All of its imports are at its top, where ranks share them.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from stand_in_installed import STAND_INS

# megatron-core says these in every rank, some several times; no user of this script can do anything about them.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")
warnings.filterwarnings("ignore", message="full scope is deprecated")
warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated")
warnings.filterwarnings("ignore", message="Please use DTensor instead")

import numpy
from gpt_arguments import parse_args
from gpt_checkpoint import load_checkpoint, maybe_finalize_async_save, save_checkpoint
from gpt_data import SyntheticTokens, training_samples, validation_samples
from gpt_memory import restore_from_memory, save_in_memory
from gpt_model import get_model, get_optimizer_and_scheduler
from gpt_utils import ExitSignal, print_rank_0, print_rank_last, print_weights_hash, training_log
from megatron.core import parallel_state, tensor_parallel
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ft import fault_tolerance as ft
from megatron_ft.rank.faults.injection import FaultInjector

CUDA = torch.cuda.is_available()


def initialize_megatron(args: argparse.Namespace) -> None:
    if CUDA:
        torch.cuda.set_device(args.local_rank)
    else:
        torch.set_num_threads(1)  # another number of threads sums in another order: other bits
    torch.distributed.init_process_group(
        backend=args.distributed_backend or ("nccl" if CUDA else "gloo"),
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    if STAND_INS:
        print_rank_0(f"  runs without CUDA; the CPU stands in for {', '.join(STAND_INS)}")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        create_gloo_process_groups=False,
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    init_num_microbatches_calculator(
        args.rank,
        rampup_batch_size=None,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
    )


def forward_step(samples: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """One micro-batch through this pipeline stage; on the last one, the schedule calls the returned function."""
    rows = next(samples)
    if CUDA:
        rows = rows.cuda(non_blocking=True)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    length = tokens.size(1)
    position_ids = torch.arange(length, device=rows.device).expand_as(tokens)
    # True is what attention must not see: the future.
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=rows.device).triu(1)
    losses = model(tokens, position_ids, future, labels=labels)
    return losses, loss_func


def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def average_loss(per_micro_batch: list[dict[str, torch.Tensor]]) -> float | None:
    """The loss over the global batch; None but on the last pipeline stage. A collective of data-parallel ranks."""
    if not per_micro_batch:
        return None
    loss = torch.stack([losses["lm loss"] for losses in per_micro_batch]).mean()
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return loss.item() / parallel_state.get_data_parallel_world_size()


def train_step(
    samples: Iterator[torch.Tensor], model: Any, optimizer: Any, scheduler: Any, args: argparse.Namespace
) -> tuple[list[dict[str, torch.Tensor]], float | None]:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=samples,
        model=[model],
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    _successful, grad_norm, _zeros = optimizer.step()
    scheduler.step(increment=args.global_batch_size)
    return losses, grad_norm


def evaluate_and_print_results(
    iteration: int,
    data: SyntheticTokens,
    model: Any,
    state: ft.GlobalState,
    exit_signal: ExitSignal,
    args: argparse.Namespace,
) -> None:
    samples = validation_samples(data, **data_position(args))
    model.eval()
    total = 0.0
    with torch.no_grad():
        for _ in range(args.eval_iters):
            ft.on_eval_step_start(state)
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=samples,
                model=[model],
                num_microbatches=get_num_microbatches(),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=True,
            )
            ft.on_eval_step_end(state)
            total += average_loss(losses) or 0.0
            if exit_signal.seen_by_any_rank():
                break
    model.train()
    if exit_signal.is_agreed:
        print_rank_0(f"  leaving the evaluation at iteration {iteration}")
        return
    print_rank_last(f" validation loss at iteration {iteration} | lm loss value: {total / args.eval_iters:.6E} |")


def data_position(args: argparse.Namespace) -> dict[str, int]:
    return {
        "micro_batch_size": args.micro_batch_size,
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "dp_size": parallel_state.get_data_parallel_world_size(),
    }


def save_with_hooks(
    iteration: int, model: Any, optimizer: Any, scheduler: Any, state: ft.GlobalState, args: argparse.Namespace
) -> None:
    ft.on_checkpointing_start(state)
    save_checkpoint(iteration, model, optimizer, scheduler, args)
    ft.on_checkpointing_end(is_async_finalization=False, global_state=state)


def finalize_async_save_with_hooks(state: ft.GlobalState, *, blocking: bool) -> None:
    ft.on_checkpointing_start(state)
    maybe_finalize_async_save(blocking=blocking)
    ft.on_checkpointing_end(is_async_finalization=True, global_state=state)


def train(
    iteration: int,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    state: ft.GlobalState,
    injector: FaultInjector,
    args: argparse.Namespace,
) -> int:
    """Train from `iteration` (the number of finished ones) on; returns the number of finished iterations."""
    data = SyntheticTokens(vocab_size=args.vocab_size, seq_length=args.seq_length, seed=args.seed)
    samples = training_samples(data, consumed_samples=args.consumed_train_samples, **data_position(args))
    exit_signal = ExitSignal(enabled=args.exit_signal_handler)
    saved = iteration
    logged, seconds = iteration, 0.0
    model.train()
    while iteration < args.train_iters:
        if args.async_save:
            finalize_async_save_with_hooks(state, blocking=False)
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        state.train_state.step = iteration
        ft.on_training_step_start(state)
        started = time.perf_counter()
        losses, grad_norm = train_step(samples, model, optimizer, scheduler, args)
        injector.on_iteration(iteration)  # before the step counts: it is lost with the rank
        ft.on_training_step_end(state)
        seconds += time.perf_counter() - started
        iteration += 1
        args.consumed_train_samples += args.global_batch_size

        if iteration % args.log_interval == 0:
            loss = average_loss(losses)
            training_log(iteration, loss, grad_norm, seconds / (iteration - logged), optimizer, args)
            logged, seconds = iteration, 0.0
        if args.eval_interval and iteration % args.eval_interval == 0:
            evaluate_and_print_results(iteration, data, model, state, exit_signal, args)
        save_in_memory(iteration, model, optimizer, scheduler, args)
        if args.save and iteration % args.save_interval == 0 and not exit_signal.is_agreed:
            save_with_hooks(iteration, model, optimizer, scheduler, state, args)
            saved = iteration
        asked_to_exit = exit_signal.seen_by_any_rank()
        if asked_to_exit or (args.exit_interval and iteration % args.exit_interval == 0):
            print_rank_0(f"  exiting at iteration {iteration}{' after SIGTERM' if asked_to_exit else ''}")
            break
    if args.save and saved != iteration:
        save_with_hooks(iteration, model, optimizer, scheduler, state, args)
    if args.async_save:
        finalize_async_save_with_hooks(state, blocking=True)
    return iteration


def main() -> None:
    args = parse_args()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Ctrl-C ends a rank at once. A KeyboardInterrupt in a save would wait for the save's helper, for ever.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    initialize_megatron(args)
    settings = ft.FaultToleranceSettings(
        enable_ft_package=args.enable_ft_package,
        calc_ft_timeouts=args.calc_ft_timeouts,
        simulate_fault=args.simulate_fault,
        simulated_fault_type=args.simulated_fault_type,
        simulated_fault_rank=args.simulated_fault_rank,
        simulated_fault_base_delay=args.simulated_fault_base_delay,
    )
    state = ft.GlobalState.create(save=args.save, async_save=args.async_save, ft=settings, train_iters=args.train_iters)
    ft.setup(state.cfg, state)
    ft.maybe_setup_simulated_fault(settings)
    injector = FaultInjector(
        args.planned_faults,
        rank=args.rank,
        cycle=int(os.environ.get("FT_CYCLE", "0")),
        client=state.rank_monitor_client,
    )
    model = get_model(args)
    optimizer, scheduler = get_optimizer_and_scheduler(model, args)
    args.consumed_train_samples = 0
    loaded = restore_from_memory(model, optimizer, scheduler, args)
    is_in_memory = loaded is not None
    if not is_in_memory:
        loaded = load_checkpoint(model, optimizer, scheduler, args)
    if loaded is not None:
        ft.on_checkpoint_loaded(is_local_chkpt=is_in_memory, global_state=state)
    state.train_state.step = train(loaded or 0, model, optimizer, scheduler, state, injector, args)
    print_weights_hash(model, args)
    ft.shutdown(state)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


# The guard is needed: megatron-core starts a helper of its checkpoint writer by spawn, which imports this again.
if __name__ == "__main__":
    main()
