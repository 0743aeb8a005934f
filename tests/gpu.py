"""What only a GPU shows, on one GPU and in 8 minutes at most: `make gpu`. Nothing is downloaded.

Memory checkpoints of CUDA tensors (side stream, page-locked memory, bits), a restart with a CUDA context, NCCL with one
rank, and the verdict on a kernel that never ends. The last line says what was found; the exit code is pytest's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BOUND_S = 480


def main() -> int:
    """Run the tests that need a GPU, and print how long they took."""
    import torch

    if not torch.cuda.is_available():
        print("no GPU: nothing is checked")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", "0", "-v", "-ra", "--durations=0", "tests/e2e/test_gpu.py"]
    try:
        code = subprocess.run(command, cwd=ROOT, timeout=_BOUND_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code = 1
        print(f"given up after {_BOUND_S} s")
    print(f"{'all held' if code == 0 else 'FAILED'}, {time.monotonic() - began_s:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
