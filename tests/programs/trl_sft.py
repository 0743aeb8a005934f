"""The SFTTrainer of TRL with a LoRA adapter of PEFT: a save every 10 steps, and a start from the last one."""

import os

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

torch.manual_seed(1)
rows = torch.randint(64, (256, 16)).tolist()
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, eos_token_id=0))
options = SFTConfig(
    "out",
    max_steps=60,
    save_steps=10,
    logging_steps=1,
    per_device_train_batch_size=4,
    use_cpu=True,
    bf16=False,
    report_to=[],
    max_length=16,
)
words = Tokenizer(WordLevel({f"w{at}": at for at in range(64)}, "w0"))
trainer = SFTTrainer(
    model,
    options,
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0"),
    peft_config=LoraConfig(task_type="CAUSAL_LM"),
)
trainer.train(resume_from_checkpoint=os.path.isdir("out/checkpoint-20"))
if trainer.is_world_process_zero():
    torch.save(get_peft_model_state_dict(trainer.model), "weights.pt")
