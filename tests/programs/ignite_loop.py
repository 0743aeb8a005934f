"""An engine of PyTorch-Ignite with its Checkpoint handler every 20 iterations, loaded at the start."""

import glob
import os
import time

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver


def training(_local_rank: int) -> None:
    torch.manual_seed(1)
    model = idist.auto_model(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters()))

    def step(engine: Engine, _batch: object) -> float:
        seed = 2 * engine.state.iteration + idist.get_rank()
        loss = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if idist.get_rank() == 0:
            print(f"step {engine.state.iteration} loss {loss.item()}", flush=True)
        time.sleep(0.05)
        return loss.item()

    trainer = Engine(step)
    everything = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = Checkpoint(everything, DiskSaver("out", require_empty=False))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=20), saver)
    if saves := sorted(glob.glob("out/*.pt"), key=os.path.getmtime):
        Checkpoint.load_objects(everything, torch.load(saves[-1], weights_only=False))
    trainer.run(range(60), max_epochs=1)
    if idist.get_rank() == 0:
        torch.save(getattr(model, "module", model).state_dict(), "weights.pt")


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(training)
