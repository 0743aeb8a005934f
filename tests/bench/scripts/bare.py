"""torch and a process group, nothing else."""

# ruff: noqa: E402

from __future__ import annotations

from stamp import stamp

stamp("user")
import torch.distributed  # noqa: F401

stamp("imported")
import steps

if __name__ == "__main__":
    steps.run()
