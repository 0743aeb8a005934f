"""torch and a process group, nothing else."""

from __future__ import annotations

import steps
import torch.distributed  # noqa: F401
from stamp import stamp_imported

if __name__ == "__main__":
    stamp_imported()
    steps.run()
