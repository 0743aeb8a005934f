"""A small Lightning training for tests, as a script: ``python lightning_job.py '{"save": ..., ...}'``."""

# ruff: noqa: E402

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

# The same job for either package; it is chosen before anything else is imported.
PACKAGE = os.environ.get("LIGHTNING_PACKAGE", "lightning.pytorch")
lightning = importlib.import_module(PACKAGE)

from megatron_ft.integrations.lightning import FaultToleranceCallback, FaultToleranceSectionsCallback


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(80, 4)), batch_size=2)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)


class Mishap(lightning.Callback):  # type: ignore[misc, name-defined]
    """In cycle 0, at one step of one rank: hang in the middle of the backward pass."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        is_due = trainer.global_rank == self.rank and trainer.global_step == self.step
        if not is_due or os.environ["FT_CYCLE"] != "0":
            return
        while True:
            time.sleep(1)


def main(job: dict[str, Any]) -> None:
    """Fit as ``job`` says."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    save = Path(job["save"])
    arguments: dict[str, Any] = {"autoresume": True, "calculate_timeouts": True, "exp_dir": save / "ft"}
    if job["callback"] == "sections":
        fault_tolerance: Any = FaultToleranceSectionsCallback(**arguments)
    else:
        fault_tolerance = FaultToleranceCallback(**arguments)
    checkpoints = lightning.callbacks.ModelCheckpoint(dirpath=save, every_n_train_steps=10, save_last=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=job["max_steps"],
        val_check_interval=5,
        limit_val_batches=3,
        num_sanity_val_steps=2,
        callbacks=[Mishap(*job["mishap"]), fault_tolerance, checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), ckpt_path="last")
    print(f"rank {trainer.global_rank} ended at step {trainer.global_step}", flush=True)
    # else a gloo thread that lets go of the last all_reduce while Python ends aborts the process (pytorch#190489);
    # Lightning itself does this only for nccl
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
