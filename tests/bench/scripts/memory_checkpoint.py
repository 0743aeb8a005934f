"""A rank that saves its state in memory every few steps, is killed once, and restores; it prints what that took.

The words of its command line: megabytes that the optimizer owns, megabytes of others, seconds of a step, every which,
and the device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from megatron_ft import memory_checkpoint

MB = 1 << 20
owned_mb, other_mb, every = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
step_s = float(sys.argv[3])
torch.set_num_threads(1)
device = sys.argv[5]
parameters = [torch.nn.Parameter(torch.rand(8 * MB // 4, device=device)) for _ in range(owned_mb // 16)]
optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
others = [torch.rand(8 * MB // 4, device=device) for _ in range(other_mb // 8)]
for parameter in parameters:
    parameter.grad = torch.rand_like(parameter)


def state_after(iteration: int) -> dict[str, object]:
    named = {str(at): parameter for at, parameter in enumerate(parameters)}
    return {"parameters": named, "optimizer": optimizer.state_dict(), "others": others, "iteration": iteration}


def copy_s() -> float:
    """Seconds of a plain copy of the tensors that `save` copies."""
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
    print("FIGURES", json.dumps(figures), flush=True)


optimizer.step()
state = state_after(0)
started = time.perf_counter()
restored = memory_checkpoint.restore(state)
if restored is not None:
    finish()
    say(restore_s=time.perf_counter() - started)
    sys.exit()
plain_s: list[float] = []
for iteration in range(1, 6 * every + 1):
    time.sleep(step_s)
    finish()
    started = time.perf_counter()
    optimizer.step()
    finish()
    stepped = time.perf_counter()
    memory_checkpoint.save(iteration, state_after(iteration), every=every)
    saved = time.perf_counter()
    if iteration % every == 0:
        say(save_s=saved - stepped, copy_s=copy_s(), number=iteration // every)
    elif iteration % every == 1 and iteration > 1:
        say(next_step_s=stepped - started, number=iteration // every)
    else:
        plain_s.append(stepped - started)
say(step_s=sorted(plain_s)[len(plain_s) // 2])
memory_checkpoint.wait()
os.kill(os.getpid(), signal.SIGKILL)
