"""For ``--ft-preload``: what `examples/train_gpt.py` imports, as it imports it where there is no CUDA."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import cpu_stand_in

sys.path.pop(0)
cpu_stand_in.install()

import tests.support.megatron_imports  # noqa: F401, E402
