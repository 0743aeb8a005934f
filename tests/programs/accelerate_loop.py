"""A loop with accelerate: `save_state` every 20 steps, `load_state` at the start."""

import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(cpu=True)
set_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
begin = max([int(name) for name in os.listdir("out")] if os.path.isdir("out") else [0])
if begin:
    accelerator.load_state(f"out/{begin}")
for step in range(begin, 60):
    loss = model(torch.randn(8, 16)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item()}", flush=True)
    if step % 20 == 19:
        accelerator.save_state(f"out/{step + 1}")
    time.sleep(0.05)
accelerator.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
