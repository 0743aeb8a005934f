"""For ``--ft-preload``: what `examples/train_gpt.py` imports, as it imports it where there is no CUDA."""

# ruff: noqa: E402, F401

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import cpu_stand_in

sys.path.pop(0)
cpu_stand_in.install()

import megatron.core.dist_checkpointing.strategies.async_utils
import megatron.core.distributed
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer
import megatron.core.optimizer_param_scheduler
import megatron.core.pipeline_parallel
