"""Train a tiny GPT with PyTorch Lightning under `ft_launcher`, resuming by itself.

    ft_launcher --nproc-per-node 2 --max-restarts 3 \
        --ft-rank-section-timeouts=setup:120,step:30,checkpointing:60 \
        --ft-rank-out-of-section-timeout=60 \
        examples/lightning_gpt.py --save /tmp/gpt

One callback is all that fault tolerance takes. `--simulate-fault rank_hung --fault-after 5` rehearses a hang.
With FAULT_TOL_FINISHED_FLAG_FILE set, the callback writes that file when `--max-steps` is reached, which ends the
loop of jobs in examples/autoresume/launch.sh.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from gpt_data import SyntheticTokens
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from megatron_ft import WorkloadAction, WorkloadControlRequest
from megatron_ft.integrations.lightning import FaultToleranceSectionsCallback, SimulatedFaultParams

VOCABULARY, LENGTH, WIDTH = 32, 32, 64


class Tokens(Dataset[torch.Tensor]):
    """Samples of `size` sequences, LENGTH + 1 tokens each."""

    def __init__(self, first: int, size: int) -> None:
        self._tokens = SyntheticTokens(vocab_size=VOCABULARY, seq_length=LENGTH, seed=1)
        self._first, self._size = first, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self._tokens.sample(self._first + index))


class GPT(LightningModule):
    """Two causal transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next token; `batch` is [samples, LENGTH + 1]."""
        hidden = self.tokens(batch[:, :-1]) + self.positions.weight
        logits = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.global_step}")
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("validation loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def policy(error: BaseException) -> WorkloadControlRequest | None:
    """What a restart can't mend ends the job; None leaves everything else to the launcher."""
    if isinstance(error, FloatingPointError):
        return WorkloadControlRequest(WorkloadAction.ShutdownWorkload, str(error))
    return None


def parse_args() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT with PyTorch Lightning under ft_launcher.")
    parser.add_argument("--save", type=Path, required=True, help="directory of checkpoints and learned timeouts")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--steps-per-epoch", type=int, default=20, help="each epoch ends with a checkpoint")
    parser.add_argument("--simulate-fault", choices=["rank_killed", "rank_hung", "random"])
    parser.add_argument("--fault-after", type=float, default=5.0, metavar="S", help="seconds, in every cycle")
    return parser.parse_args()


def main() -> None:
    """Train from the last checkpoint, if there is one, to `--max-steps`."""
    args = parse_args()
    ranks, batch = int(os.environ.get("WORLD_SIZE", 1)), 8
    fault = SimulatedFaultParams(args.simulate_fault, args.fault_after) if args.simulate_fault else None
    fault_tolerance = FaultToleranceSectionsCallback(
        autoresume="FAULT_TOL_FINISHED_FLAG_FILE" in os.environ,
        calculate_timeouts=True,
        simulated_fault_params=fault,
        exp_dir=args.save,
        exc_handling_policy=policy,
    )
    trainer = Trainer(
        max_steps=args.max_steps,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy="ddp",
        callbacks=[fault_tolerance, ModelCheckpoint(args.save, every_n_epochs=1, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        GPT(),
        DataLoader(Tokens(0, args.steps_per_epoch * batch * ranks), batch_size=batch),
        DataLoader(Tokens(2**40, 4 * batch * ranks), batch_size=batch),
        ckpt_path="last",
    )
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: {trainer.callback_metrics.get('validation loss')}")
    if torch.distributed.is_initialized():
        # Lightning does this only for nccl; a gloo thread that is busy while Python ends aborts the process
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
