"""The Trainer of transformers: a save every 10 steps, and a start from the last one."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = torch.randint(64, (256, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
options = TrainingArguments(
    "out", max_steps=60, save_steps=10, logging_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to=[]
)
trainer = Trainer(model, options, train_dataset=data)
trainer.train(resume_from_checkpoint=os.path.isdir("out/checkpoint-20"))
if trainer.is_world_process_zero():
    torch.save(model.state_dict(), "weights.pt")
