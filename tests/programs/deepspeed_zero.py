"""DeepSpeed's ZeRO on the CPU: a save every 10 steps, and a start from the last one."""

import os

import deepspeed
import torch

deepspeed.init_distributed("gloo")
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
_, state = engine.load_checkpoint("out") if os.path.exists("out/latest") else (None, {"step": 0})
for step in range(state["step"], 60):
    torch.manual_seed(2 * step + deepspeed.comm.get_rank())
    loss = engine(torch.randn(4, 16)).square().mean()
    engine.backward(loss)
    engine.step()
    if deepspeed.comm.get_rank() == 0:
        print(f"step {step} loss {loss.item()}", flush=True)
    if step % 10 == 9:
        engine.save_checkpoint("out", client_state={"step": step + 1})
if deepspeed.comm.get_rank() == 0:
    torch.save(net.state_dict(), "weights.pt")
