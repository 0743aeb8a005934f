"""Steps of a process group until they are ended."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def main() -> None:
    # opened here: our ranks are forked after the imports
    stamps = os.open(os.environ["FT_BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def stamp(event: str, number: int) -> None:
        """Append a line, with the time on the clock that all processes of a machine share."""
        line = f"{os.environ['RANK']} {os.getpid()} {event} {number} {time.monotonic_ns()}\n"
        os.write(stamps, line.encode())

    stamp("user", 0)
    dist.init_process_group("gloo")
    tensor, number = torch.ones(1024), 0
    while True:
        number += 1
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        time.sleep(0.02)
        stamp("step", number)


if __name__ == "__main__":
    main()
