"""Makes a process group without a look at its environment."""

import sys

import torch
import torch.distributed as dist

model = torch.nn.Linear(2, 2)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(int(total), dist.get_rank(), sum(p.numel() for p in model.parameters()))
dist.destroy_process_group()
sys.exit(3)
