"""``make slurm``: jobs on a real Slurm, and what clusters do to them. Needs root, and Debian's packages of Slurm.

    make slurm SLURM_ARGS="--only scancel"

Slurm runs in namespaces of this machine (``cluster.py``), with a user's batch scripts on it. Each row is a job to which
something happens; it has to end with the exit code and the ``result.json`` that docs/results.md says, and with the
weights of the undisturbed one wherever it can end. A row that can't be made is a failure; nothing is skipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.slurm.cluster import PACKAGES, Cluster, missing
from tests.slurm.rows import ROWS
from tests.slurm.run import Run

NODES = 4
FIRST = "undisturbed"


def main() -> int:
    """0 if every row is as it has to be."""
    parser = argparse.ArgumentParser(description="Jobs on a real Slurm, and what clusters do to them.")
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="rows whose name holds one of these")
    args = parser.parse_args()
    if missing() or os.geteuid() != 0:
        lacking = ", ".join(missing()) or "root"
        print(f"make slurm: {lacking} missing. As root: apt-get install {PACKAGES}", file=sys.stderr)
        return 1
    chosen = [name for name in ROWS if name == FIRST or any(text in name for text in args.only)]
    root = Path(tempfile.mkdtemp(prefix="ft_slurm", dir="/var/tmp"))  # each node has a /tmp of its own
    root.chmod(0o755)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and what was made is removed
    bad, weights = [], ""
    with Cluster(root, NODES) as cluster:
        for name in chosen:
            began = time.monotonic()
            run = Run(cluster, root / name.replace(" ", "_"), weights)
            try:
                ROWS[name](run)
            except (AssertionError, LookupError, OSError, RuntimeError, subprocess.SubprocessError) as error:
                run.problems.append(str(error) or repr(error))
            weights = weights or run.weights
            run.clean_up()
            lives = " ".join(str(life["outcome"]) for life in run.lives) or "-"
            verdict = "held" if not run.problems else "; ".join(run.problems)
            print(f"{name:<30} {time.monotonic() - began:5.0f} s  {lives:<28} {verdict}", flush=True)
            if run.problems:
                bad.append(name)
    if bad:
        print(f"files: {root}")
    else:
        shutil.rmtree(root)
    print(f"{len(chosen) - len(bad)} of {len(chosen)} rows held")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
