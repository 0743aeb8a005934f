"""Run a program that asks for GPUs on the CPU, without a change of its files: `on_cpu.py PROGRAM ARGUMENTS`."""

import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data._utils import pin_memory as pinning

CPU = torch.device("cpu")


def stand_in(value: Any) -> Any:
    """The CPU for the name or the number of a GPU, gloo for NCCL, anything else as it is."""
    if value == "nccl":
        return "gloo"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return CPU if is_number or (isinstance(value, str) and value.startswith("cuda")) else value


def on_cpu(owner: Any, name: str) -> None:
    function = getattr(owner, name)

    def call(*args: Any, device_id: Any = None, **options: Any) -> Any:
        return function(*map(stand_in, args), **{key: stand_in(value) for key, value in options.items()})

    setattr(owner, name, call)


accelerator: Any = torch.accelerator
accelerator.is_available = lambda: True
accelerator.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
accelerator.current_accelerator = lambda check_available=False: None if check_available else CPU
accelerator.set_device_index = torch.cuda.set_device = lambda *_: None
pinning.pin_memory = lambda data, _device=None: data
tensors: Any = torch.Tensor
tensors.pin_memory = lambda self, *_: self
for owner, name in ((torch.Tensor, "to"), (torch.nn.Module, "to"), (torch, "load"), (dist, "init_process_group")):
    on_cpu(owner, name)
wrapper: Any = DistributedDataParallel
of_gpus = wrapper.__init__
wrapper.__init__ = lambda self, module, device_ids=None, **options: of_gpus(self, module, **options)

if __name__ == "__main__":
    torch.manual_seed(1)  # some of them set no seed
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
