"""What memory checkpoints cost the training thread, beside a plain copy of the same bytes, and a restore per GB.

python tests/bench/memory_checkpoints.py --owned 1024 --others 128 --step 1 --every 10
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
SCRIPT = Path(__file__).with_name("scripts") / "memory_checkpoint.py"
_BOUND_S = 600


def main() -> None:
    """Run one job and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--owned", type=int, default=256, help="MiB of parameters and optimizer state")
    parser.add_argument("--others", type=int, default=64, help="MiB of other tensors, copied within save")
    parser.add_argument("--step", type=float, default=0.3, help="seconds of a step")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    words = [str(each) for each in (given.owned, given.others, given.step, given.every, given.device)]
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "megatron_ft.launcher", "--nproc-per-node", "1", "--max-restarts", "1"]
        command += ["--ft-log-dir", logs, str(SCRIPT), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    figures = [json.loads(text) for text in re.findall(r"^FIGURES (.*)$", done.stdout, re.MULTILINE)]

    def median(name: str) -> float:
        # the first snapshot finds no optimizer state reserved, and its buffer has no pages yet
        return statistics.median(each[name] for each in figures if name in each and each.get("number", 9) > 1)

    gigabytes = (given.owned + given.others) * (1 << 20) / 1e9
    wait_s = max(0.0, median("next_step_s") - median("step_s"))
    interval_s = given.every * given.step
    print(f"{gigabytes:.2f} GB per rank, of which {given.others} MiB are copied within save")
    print(f"save                          {1e3 * median('save_s'):8.1f} ms")
    print(f"plain copy of the same bytes  {1e3 * median('copy_s'):8.1f} ms")
    print(f"ratio                         {median('save_s') / median('copy_s'):8.2f}")
    print(f"next optimizer step waits     {1e3 * wait_s:8.1f} ms (of {1e3 * median('step_s'):.0f} ms)")
    print(f"share of training time        {100 * (median('save_s') + wait_s) / interval_s:8.2f} %")
    print(f"restore                       {median('restore_s') / gigabytes:8.2f} s per GB")


if __name__ == "__main__":
    main()
