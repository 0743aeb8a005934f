"""A job under one of the launchers, with nothing left of it at the end."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from megatron_ft.link.linux.processes import all_processes, carries, kill_matching
from tests.bench.stamps import Stamp, parse

__all__ = ["LAUNCHERS", "ROOT", "SCRIPTS", "Enclosure", "Job", "end_on_sigterm", "interleaved", "progress", "pss_mib"]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "bench" / "scripts"
MARK = "FT_BENCH_MARK"
T = TypeVar("T")

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

    def pids(self) -> list[int]:
        """Of all its processes."""
        return [stat.pid for stat in all_processes() if carries(stat.pid, self._mark.encode())]


def environment(launcher: str, reference: str) -> dict[str, str]:
    """Nothing that makes a launcher take itself for a rank; nothing of the reference where it isn't measured."""
    prefixes = ("FT_", "PET_", "TORCHELASTIC_", "TORCH_ELASTIC_", "GROUP_", "ROLE_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    env = {key: value for key, value in os.environ.items() if key not in names and not key.startswith(prefixes)}
    # one of the scripts calls our hooks, which do nothing under the others
    path = f"{reference}{os.pathsep}{ROOT}" if launcher == "reference" else str(ROOT)
    return {**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Job:
    """``with Job(...) as job``: at the end of the block all its processes are killed and its files removed.

    ``{directory}`` in a word of the command is its directory.
    """

    def __init__(
        self,
        launcher: str,
        command: Sequence[str],
        *,
        reference: str,
        ranks: int = 2,
        options: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``variables`` are set in addition."""
        self.ranks = ranks
        self._enclosure = Enclosure(launcher, reference)
        self.directory = self._enclosure.directory
        self._stamps, self._output = self.directory / "stamps", self.directory / "output"
        env = {**self._enclosure.env, **variables, "FT_BENCH_STAMPS": str(self._stamps)}
        if launcher == "torchrun":  # its ranks and agent share a store, and a job that loses a rank often hangs
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        common = ("--nproc-per-node", str(ranks), "--max-restarts", "20")
        words = [word.replace("{directory}", str(self.directory)) for word in command]
        try:
            with self._output.open("w") as output:
                self.began = time.monotonic()
                self._process = subprocess.Popen(
                    [sys.executable, *LAUNCHERS[launcher], *common, *options, *words],
                    cwd=self.directory,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException:
            self._enclosure.__exit__()
            raise

    def __enter__(self) -> Job:
        """Runs already."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Ends it."""
        # the launcher first: it would start again what it sees die
        self._process.kill()
        self._process.wait()
        self._enclosure.__exit__()

    def stamps(self) -> list[Stamp]:
        """So far."""
        try:
            return parse(self._stamps.read_text())
        except FileNotFoundError:
            return []

    def wait_for(self, look: Callable[[list[Stamp]], T | None], timeout_s: float) -> T | None:
        """Until ``look`` finds something in the stamps; None when the time is over or the job has ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = self._process.poll() is not None
            found = look(self.stamps())
            if found is not None or has_ended or time.monotonic() > deadline:
                return found
            time.sleep(0.05)  # often enough to see it; the times themselves are in the stamps

    def tail(self) -> str:
        """The last lines of the output, to see why it didn't work."""
        return "\n".join(self._output.read_text(errors="replace").splitlines()[-15:])

    def pss_mib(self) -> float:
        """Memory of everything that belongs to the job: launcher, monitors, ranks, what they have forked."""
        return sum(pss_mib(pid) for pid in self._enclosure.pids())


def pss_mib(pid: int) -> float:
    """Memory of one process, a page that n of them share counted as the nth part; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pss:")), 0) / 1024
    except OSError:
        return 0.0


def interleaved(runs: int, launchers: Sequence[str], budget_s: float = math.inf) -> Iterator[tuple[int, str]]:
    """Run by run, in each all launchers: a slow minute of the machine hits all of them.

    On a slow machine there are fewer runs: after two, none begins that wouldn't end within the budget.
    """
    began = time.monotonic()
    for run in range(runs):
        took_s = time.monotonic() - began
        if run >= 2 and took_s * (run + 1) / run > budget_s:
            progress(f"the time is over: {run} runs instead of {runs}")
            return
        for launcher in launchers:
            yield run, launcher


def end_on_sigterm() -> None:
    """As on Ctrl-C: through the blocks that clean up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
