"""A model of litgpt under Lightning Fabric."""

import lightning
import torch
from litgpt import GPT, Config

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(1)
model = GPT(Config.from_name("pythia-14m", n_layer=1, n_embd=32, n_head=2, block_size=16, padded_vocab_size=64))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
for step in range(60):
    batch = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(2 * step + fabric.global_rank))
    loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"step {step} loss {loss.item()}", flush=True)
fabric.save("weights.pt", {"model": model})
