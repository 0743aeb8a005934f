"""Let the CPU stand in for CUDA under megatron-core 0.16 and 0.17, where there is no CUDA.

megatron-core says "cuda" in a few places that a plain GPT on the local layer spec passes through. On a machine
without CUDA, `install` gives those places a meaning on the CPU; on a machine with CUDA it changes nothing at all.
This is a convenience of the example, no part of the `megatron_ft` package.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = ("empty", "ones", "tensor", "zeros")
_installed = False


def install() -> list[str]:
    """Replace the CUDA-only spots; call it before anything of megatron-core is imported.

    Returns what is replaced, in words for a log line; empty where CUDA exists. A second call changes nothing.
    """
    global _installed
    if torch.cuda.is_available():
        return []
    if not _installed:
        _replace_compiler()
        _replace_cuda_module()
        _replace_tensor_spots()
        _replace_random_helpers()
        _replace_checkpoint_helper()
        _installed = True
    return [
        "torch.cuda (device, synchronize, random states)",
        f"torch.{'/'.join(_FACTORIES)} on device 'cuda'",
        "Tensor.cuda and Tensor.type",
        "megatron-core's random helpers",
        "torch.compile",
        "the process that megatron-core's first save spawns (a fork)",
    ]


def _replace_compiler() -> None:
    """Leave functions as they are instead of compiling them.

    megatron-core decorates its fused functions with torch.compile at import. The fusions stay off on the CPU (each
    would compile for seconds first), and the decorating alone imports the compiler: a second of every start.
    """

    def compile_nothing(model: Callable[..., Any] | None = None, **_options: Any) -> Any:
        return model if model is not None else (lambda function: function)

    torch.compile = compile_nothing


def _replace_cuda_module() -> None:
    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def cpu_device() -> torch.device:
        return torch.device("cpu")

    def get_rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    torch.cuda.current_device = cpu_device
    torch.cuda.synchronize = nothing
    torch.cuda.get_rng_state = get_rng_state
    torch.cuda.set_rng_state = set_rng_state
    torch.cuda.manual_seed = manual_seed


def _replace_tensor_spots() -> None:
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))

    def stay(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self

    original_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original_type(self, *args, **kwargs)
        # Gradient clipping and the bf16 optimizer compare this name with 'torch.cuda.FloatTensor' and the like.
        if isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.cuda = stay
    torch.Tensor.type = cuda_type


def _replace_random_helpers() -> None:
    """Let megatron-core's tracker of random states keep those of the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        assert not graph_safe, "random states for CUDA graphs don't exist without CUDA"
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        assert not graph_safe, "random states for CUDA graphs don't exist without CUDA"
        torch.set_rng_state(new_state)

    def worth_saying(record: logging.LogRecord) -> bool:
        # The tracker warns when the CPU generator moves while it holds the GPU's. Here they are the same.
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    logging.getLogger(megatron_random.__name__).addFilter(worth_saying)


def _replace_checkpoint_helper() -> None:
    """Fork the process that holds the results of megatron-core's writers, instead of spawning it.

    A fresh one imports this script, torch and Megatron, to hold one queue: the first save of every rank and every
    cycle waits for it, some seconds on a small machine. The writers themselves are forks anyway.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def results_queue(_start_method: str = "fork") -> Any:
        if filesystem_async._results_queue is None:
            filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
        return filesystem_async._results_queue

    # megatron-core 0.16 has it with an underscore, 0.17 without.
    public = hasattr(filesystem_async, "get_write_results_queue")
    setattr(filesystem_async, "get_write_results_queue" if public else "_get_write_results_queue", results_queue)
