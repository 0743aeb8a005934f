"""A rank that saves its state, is killed, and restores: ``memory_checkpoint.py KIND DEVICE SAVES FIGURES``.

It writes what that took as JSON lines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch

from megatron_ft import memory_checkpoint

MIB = 1 << 20
kind, device, saves, figures_path = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]


def state() -> Any:
    match kind:
        case "large":
            return [torch.rand(2 * MIB, device=device) for _ in range(128)]
        case "tiny":
            return [torch.rand(16, device=device) for _ in range(20_000)]
        case _:
            return list(range(10**6))


def copy_s(values: list[Any]) -> float:
    """Return the seconds of a plain copy of the same values, into memory whose pages are there."""
    if not isinstance(values[0], torch.Tensor):
        return seconds(lambda: list(values))
    room = [torch.empty_like(each, device="cpu", pin_memory=device == "cuda") for each in values]

    def copy() -> None:
        for value, into in zip(values, room, strict=True):
            into.copy_(value)

    copy()
    return seconds(copy)


def seconds(act: Any) -> float:
    finish()
    began_s = time.perf_counter()
    act()
    finish()
    return time.perf_counter() - began_s


def finish() -> None:
    """Wait for the device: what is measured includes what was only enqueued."""
    if device == "cuda":
        torch.cuda.synchronize()


def say(**figures: float) -> None:
    with open(figures_path, "a") as file:
        file.write(json.dumps(figures) + "\n")


kept = {"values": state(), "iteration": 0}
torch.set_num_threads(1)
if os.environ["FT_CYCLE"] == "0":
    assert memory_checkpoint.restore(kept) is None
    for iteration in range(1, saves + 2):
        save_s = seconds(lambda: memory_checkpoint.save(iteration, kept))  # noqa: B023
        memory_checkpoint.wait()
        say(save_s=save_s, copy_s=copy_s(kept["values"]))
    os.kill(os.getpid(), signal.SIGKILL)
restored: list[int | None] = []
took_s = seconds(lambda: restored.append(memory_checkpoint.restore(kept)))
assert restored == [saves + 1]
say(restore_s=took_s)
