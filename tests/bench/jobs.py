"""A job under one of the launchers, with nothing left of it at the end."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ft.link.linux.processes import carries, kill_matching

__all__ = ["LAUNCHERS", "ROOT", "SCRIPTS", "Enclosure", "end_on_sigterm", "interleaved", "progress"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "bench" / "scripts"
MARK = "FT_BENCH_MARK"

LAUNCHERS: dict[str, tuple[str, ...]] = {
    "ours": ("-m", "megatron_ft.launcher"),
    "torchrun": ("-m", "torch.distributed.run"),
    # what no job could have without a file of the network cards, and what it asks for before it starts
    "reference": (
        *("-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
        *("--ft-rank-heartbeat-timeout", "60", "--ft-enable-nic-monitor", "false"),
    ),
}


def progress(message: str) -> None:
    """To the one who waits."""
    print(f"bench: {message}", file=sys.stderr, flush=True)


class Enclosure:
    """A directory for all files and a mark for all processes of something; at the end of the block both go."""

    def __init__(self, launcher: str, reference: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ft-bench-"))
        self._mark = f"{MARK}={os.urandom(8).hex()}"
        self.env = environment(launcher, reference)
        self.env |= {"TMPDIR": str(self.directory), "XDG_STATE_HOME": str(self.directory)}
        self.env[MARK] = self._mark.partition("=")[2]

    def __enter__(self) -> Enclosure:
        """Is there already."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Kills and removes."""
        left = kill_matching(lambda stat: carries(stat.pid, self._mark.encode()), timeout_s=10.0)
        if left:
            progress(f"processes are left: {[stat.pid for stat in left]}")
        shutil.rmtree(self.directory, ignore_errors=True)


def environment(launcher: str, reference: str) -> dict[str, str]:
    """Nothing that makes a launcher take itself for a rank; nothing of the reference where it isn't measured."""
    prefixes = ("FT_", "PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "GROUP_", "ROLE_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    env = {key: value for key, value in os.environ.items() if key not in names and not key.startswith(prefixes)}
    # one of the scripts calls our hooks, which do nothing under the others
    path = f"{reference}{os.pathsep}{ROOT}" if launcher == "reference" else str(ROOT)
    return {**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def interleaved(runs: int, launchers: Sequence[str]) -> Iterator[str]:
    """Run by run, in each all launchers: a slow minute of the machine hits all of them."""
    for _ in range(runs):
        yield from launchers


def end_on_sigterm() -> None:
    """As on Ctrl-C: through the blocks that clean up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
