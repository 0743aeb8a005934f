"""Installs the CPU's stand-in for CUDA when it is imported, where there is no CUDA: import it before megatron-core."""

from __future__ import annotations

import warnings

import torch
from cpu_stand_in import install

STAND_INS = install()
if not torch.cuda.is_available():
    warnings.filterwarnings("ignore", message="When using async grad allreduce it is recommended")
