"""A small tensor- and data-parallel job on 4 ranks for the campaign: in each cycle one rank does one thing wrong.

Arguments: a JSON list with one entry for each cycle, {"kind", "rank", "iteration"}. After the last one it ends well.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from megatron_ft import RankMonitorClient

ITERATIONS = 12


def fault_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fault_sleep() -> None:
    time.sleep(3600)


def fault_spin() -> None:
    while True:
        pass


def fault_gil() -> None:
    """Lock a mutex twice in a C function called with the GIL held."""
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(128)
    lock(mutex)
    lock(mutex)


def fault_collective(group: dist.ProcessGroup) -> None:
    dist.barrier(group=group)


def fault_pipe() -> None:
    os.read(os.pipe()[0], 1)


def fault_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fault_exception() -> None:
    raise ValueError("the batch is empty")


def fault_segfault() -> None:
    ctypes.string_at(0)


def fault_exit() -> None:
    os._exit(3)


def main() -> None:
    plan = json.loads(sys.argv[1])
    rank, cycle = int(os.environ["RANK"]), int(os.environ["FT_CYCLE"])
    fault = plan[cycle] if cycle < len(plan) else None
    dist.init_process_group("gloo")
    client = RankMonitorClient()
    client.init_workload_monitoring()
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    spare = dist.new_group([0, 1, 2, 3])
    tensor_group, data_group = tensor_groups[rank // 2], data_groups[rank % 2]
    values = torch.ones(64)
    for iteration in range(ITERATIONS):
        client.set_iteration(iteration)
        with client.section("step"):
            dist.all_reduce(values, group=tensor_group)
            if fault is not None and (rank, iteration) == (fault["rank"], fault["iteration"]):
                function = globals()[f"fault_{fault['kind']}"]
                function(spare) if fault["kind"] == "collective" else function()
            dist.all_reduce(values, group=tensor_group)
            work = dist.all_reduce(values, group=data_group, async_op=True)
            work.wait()
            values /= values.sum()
        if iteration % 5 == 4:
            with client.section("checkpointing"):
                dist.barrier()
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
