"""The command line of `train_gpt.py`: Megatron-LM's flag names where Megatron-LM has one, small defaults."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from megatron_ft.errors import ConfigError
from megatron_ft.exit_codes import MISTAKE_CODE
from megatron_ft.rank.faults.plan import FAULT_TYPES, read_fault_plan
from megatron_ft.rank.hooks.user_errors import ask_for_no_restart


class _Parser(argparse.ArgumentParser):
    """Has every rank find the same mistake, and none of them restarted for it."""

    def error(self, message: str) -> NoReturn:
        ask_for_no_restart(message)
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        raise SystemExit(MISTAKE_CODE)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; a mistake ends the process, and the job, with one line and exit code 2."""
    parser = _Parser(
        description="Train a small megatron-core GPT on synthetic data, on CUDA or on the CPU.",
        epilog="Start it with ft_launcher; with --no-ft plain torchrun does, too.",
        allow_abbrev=False,
    )
    _add_model_args(parser)
    _add_training_args(parser)
    _add_checkpoint_args(parser)
    _add_fault_tolerance_args(parser)
    args = parser.parse_args(argv)
    args.rank = int(os.environ.get("RANK", "0"))
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    problem = _complete(args)
    if problem is not None:
        parser.error(problem)
    return args


def _add_model_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=int, default=2)
    group.add_argument("--hidden-size", type=int, default=64)
    group.add_argument("--ffn-hidden-size", type=int, help="default: 4 * hidden-size")
    group.add_argument("--num-attention-heads", type=int, default=4)
    group.add_argument("--seq-length", type=int, default=64)
    group.add_argument("--max-position-embeddings", type=int, help="default: seq-length")
    group.add_argument("--vocab-size", type=int, default=128)
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--bf16", action="store_true", help="bf16 weights, main weights and gradients in fp32")
    group = parser.add_argument_group("distributed")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--distributed-backend", choices=["nccl", "gloo"], help="default: nccl, without CUDA gloo")
    group.add_argument("--distributed-timeout-minutes", type=float, default=10, metavar="MINUTES")


def _add_training_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=int, default=2)
    group.add_argument("--global-batch-size", type=int, default=8)
    group.add_argument("--train-iters", type=int, default=60)
    group.add_argument("--exit-interval", type=int, help="save and exit after an iteration divisible by this")
    group.add_argument(
        "--exit-signal-handler",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="save and exit after a SIGTERM; without it, and before the first iteration, SIGTERM ends a rank at once",
    )
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--log-interval", type=int, default=5)
    group.add_argument("--eval-interval", type=int, default=20, help="0: no evaluation")
    group.add_argument("--eval-iters", type=int, default=2)
    group = parser.add_argument_group("optimizer and learning rate")
    group.add_argument("--lr", type=float, default=5e-3)
    group.add_argument("--min-lr", type=float, default=5e-4)
    group.add_argument(
        "--lr-decay-style", choices=["constant", "linear", "cosine", "inverse-square-root"], default="cosine"
    )
    group.add_argument("--lr-decay-iters", type=int, help="default: train-iters")
    group.add_argument("--lr-warmup-iters", type=int, default=5)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)


def _add_checkpoint_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", metavar="DIR", help="write checkpoints here")
    group.add_argument(
        "--load", metavar="DIR", help="resume from the last checkpoint here; default: the --save directory"
    )
    group.add_argument("--save-interval", type=int, default=10)
    group.add_argument("--async-save", action="store_true", help="write in a forked process while training goes on")
    group.add_argument("--no-load-rng", action="store_true", help="don't restore the random states")
    group.add_argument(
        "--memory-checkpoint-interval",
        type=int,
        metavar="N",
        help="keep the state in memory every N iterations; needs ft_launcher",
    )
    group.add_argument("--hash-file", metavar="FILE", help="write the hash of the final weights here, too")


def _add_fault_tolerance_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fault tolerance")
    group.add_argument(
        "--enable-ft-package",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="call the hooks of megatron_ft.fault_tolerance; needs ft_launcher",
    )
    group.add_argument(
        "--no-ft", dest="enable_ft_package", action="store_false", help="short for --no-enable-ft-package"
    )
    group.add_argument("--calc-ft-timeouts", action="store_true", help="learn the timeouts from what is observed")
    group.add_argument("--simulate-fault", action="store_true", help="one fault after a delay")
    group.add_argument("--simulated-fault-type", choices=["random", *FAULT_TYPES], default="random")
    group.add_argument("--simulated-fault-rank", type=int, help="default: a random rank")
    group.add_argument("--simulated-fault-base-delay", type=float, default=0.0, metavar="SECONDS")
    group.add_argument(
        "--fault-plan",
        metavar="FILE",
        help="YAML of exact faults at (cycle, rank, iteration), as in megatron_ft/configs/faults/",
    )


def _complete(args: argparse.Namespace) -> str | None:
    """Fill in the defaults that depend on other values; return what is wrong, if anything."""
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "save_interval"):
        if getattr(args, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"
    if args.memory_checkpoint_interval is not None and args.memory_checkpoint_interval < 1:
        return f"--memory-checkpoint-interval must be at least 1, not {args.memory_checkpoint_interval}"
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.load = args.load or args.save
    model_parallel_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % model_parallel_size != 0:
        return (
            f"{args.world_size} ranks can't be divided into groups of {args.tensor_model_parallel_size} (tensor) "
            f"x {args.pipeline_model_parallel_size} (pipeline)"
        )
    args.data_parallel_size = args.world_size // model_parallel_size
    if args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) != 0:
        return (
            f"--global-batch-size {args.global_batch_size} must be a multiple of --micro-batch-size "
            f"{args.micro_batch_size} times {args.data_parallel_size} data-parallel ranks"
        )
    if args.num_layers % args.pipeline_model_parallel_size != 0:
        return (
            f"--num-layers {args.num_layers} must be a multiple of --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}"
        )
    if args.seq_length > args.max_position_embeddings:
        return f"--max-position-embeddings {args.max_position_embeddings} is less than --seq-length {args.seq_length}"
    if args.enable_ft_package and not args.save:
        return "--save is missing: fault tolerance needs a directory for checkpoints (or say --no-ft)"
    try:
        args.planned_faults = read_fault_plan(args.fault_plan, args.world_size) if args.fault_plan else []
    except ConfigError as error:
        return str(error)
    return None
