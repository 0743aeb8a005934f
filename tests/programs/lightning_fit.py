"""A fit of Lightning that goes on from its last checkpoint."""

import os
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def on_train_batch_start(self, _batch: object, _number: int) -> None:
        time.sleep(0.05)
        print(f"step {self.global_step}", flush=True)


lightning.seed_everything(1)
saves = ModelCheckpoint("out", save_last=True)
off: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "limit_val_batches": 0}
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=[saves], **off)
model = Model()
trainer.fit(model, ckpt_path="out/last.ckpt" if os.path.exists("out/last.ckpt") else None)
if trainer.is_global_zero:
    torch.save(model.state_dict(), "weights.pt")
