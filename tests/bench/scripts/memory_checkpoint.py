"""A rank that keeps its state every few steps, is killed once, and restores; it writes what that took as JSON lines.

The words of its command line: megabytes that the optimizer owns, megabytes of others, seconds of a step, every which,
the device, the iteration after which it is killed, where the state is kept, and the file for the figures.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch

MB = 1 << 20
owned_mb, other_mb, every = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
step_s, device, last = float(sys.argv[3]), sys.argv[5], int(sys.argv[6])
kept, figures_path = sys.argv[7], sys.argv[8]
torch.set_num_threads(1)
parameters = [torch.nn.Parameter(torch.rand(8 * MB // 4, device=device)) for _ in range(owned_mb // 16)]
optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
others = [torch.rand(8 * MB // 4, device=device) for _ in range(other_mb // 8)]
for parameter in parameters:
    parameter.grad = torch.rand_like(parameter)


def state_after(iteration: int) -> dict[str, Any]:
    named = {str(at): parameter for at, parameter in enumerate(parameters)}
    return {"parameters": named, "optimizer": optimizer.state_dict(), "others": others, "iteration": iteration}


class Memory:
    """Memory checkpoints of megatron_ft."""

    def __init__(self) -> None:
        from megatron_ft import memory_checkpoint

        self._keeps = memory_checkpoint

    def restore(self, state: dict[str, Any]) -> int | None:
        return self._keeps.restore(state)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        self._keeps.save(iteration, state)

    def wait(self) -> None:
        self._keeps.wait()


class File:
    """A file in the job's directory, whole or not at all."""

    def __init__(self) -> None:
        self._path = os.path.join(os.path.dirname(figures_path), "checkpoint.pt")

    def restore(self, state: dict[str, Any]) -> int | None:
        if not os.path.exists(self._path):
            return None
        loaded = torch.load(self._path, weights_only=True)
        put(loaded, state)
        return int(loaded["iteration"])

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        with open(f"{self._path}.part", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{self._path}.part", self._path)

    def wait(self) -> None:
        """Nothing is under way."""


class Reference:
    """Local checkpoints of nvidia-resiliency-ext in /dev/shm, as files of torch.save."""

    def __init__(self) -> None:
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        self._wraps = BasicTensorAwareStateDict
        self._wraps.restore_tensor_device = lambda *_, **__: None  # to CUDA
        torch.distributed.init_process_group("gloo")
        self._manager = LocalCheckpointManager(os.environ["FT_BENCH_SHM"])

    def restore(self, state: dict[str, Any]) -> int | None:
        found = int(self._manager.find_latest())
        if found == -1:
            return None
        loaded, _ = self._manager.load()
        put(loaded.state_dict, state)
        return found

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        wrapped = self._wraps.__new__(self._wraps)  # its constructor accepts no tensor of a CPU
        wrapped.state_dict, wrapped._is_hollow = state, False
        self._manager.save(wrapped, iteration)

    def wait(self) -> None:
        """Nothing is under way: without CUDA it can't save in the background."""


def put(loaded: Any, state: Any) -> None:
    """Copy tensors of ``loaded`` to their places in ``state``."""
    if isinstance(loaded, torch.Tensor):
        with torch.no_grad():
            state.copy_(loaded)
    elif isinstance(loaded, (dict, list)):
        for key in loaded if isinstance(loaded, dict) else range(len(loaded)):
            put(loaded[key], state[key])


def copy_s() -> float:
    """Seconds of a plain copy of the tensors that `memory_checkpoint.save` copies."""
    room = [torch.empty_like(other, device="cpu", pin_memory=device == "cuda") for other in others]
    for other, into in zip(others, room, strict=True):
        into.copy_(other)  # the pages are there from now on, as those of the buffer are
    finish()
    started = time.perf_counter()
    for other, into in zip(others, room, strict=True):
        into.copy_(other)
    finish()
    return time.perf_counter() - started


def finish() -> None:
    """Wait for the device: what is measured includes what was only enqueued."""
    if device == "cuda":
        torch.cuda.synchronize()


def say(**figures: object) -> None:
    with open(figures_path, "a") as file:
        file.write(json.dumps(figures) + "\n")


keeps: Memory | File | Reference = {"memory": Memory, "file": File, "reference": Reference}[kept]()
optimizer.step()
has_failed = os.path.exists(figures_path)
started = time.perf_counter()
restored = keeps.restore(state_after(0))
finish()
if has_failed:
    restore_s = None if restored is None else time.perf_counter() - started
    say(restore_s=restore_s, redone=last - (restored or 0))
    sys.exit()
plain_s: list[float] = []
for iteration in range(1, last + 1):
    time.sleep(step_s)
    finish()
    started = time.perf_counter()
    optimizer.step()
    finish()
    stepped = time.perf_counter()
    if iteration % every == 0:
        keeps.save(iteration, state_after(iteration))
        say(save_s=time.perf_counter() - stepped, copy_s=copy_s(), number=iteration // every)
    elif iteration % every == 1 and iteration > 1:
        say(next_step_s=stepped - started, number=iteration // every)
    else:
        plain_s.append(stepped - started)
keeps.wait()
say(step_s=sorted(plain_s)[len(plain_s) // 2])
os.kill(os.getpid(), signal.SIGKILL)
