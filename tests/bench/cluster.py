"""Nodes of a job on this machine, and a scheduler that replaces lost nodes and requeues a job that has failed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_ft.link.linux.processes import carries, kill_matching
from tests import ROOT
from tests.support.launching import clean_environment

SCRIPTS = Path(__file__).with_name("scripts")
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "ours": ("-m", "megatron_ft.launcher"),
    "torchrun": ("-m", "torch.distributed.run"),
    # no job could do without the option for network cards: it asks for a file of them before it starts
    "reference": ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "--ft-enable-nic-monitor", "false"),
}
_REPLACED_AFTER_S = 10.0
"""Seconds until the scheduler has another node for a lost one, or starts a requeued job."""
_MARK, _NODE = "FT_BENCH_MARK", "FT_BENCH_NODE"


def progress(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr, flush=True)


def end_on_sigterm() -> None:
    """End on SIGTERM as on Ctrl-C: through the blocks that clean up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Stamp(NamedTuple):
    """What a rank has passed: "user" (its script has begun) or "step"; ``at`` in seconds of the clock."""

    rank: int
    pid: int
    event: str
    number: int
    at: float


class Cluster:
    """A job of some nodes with some ranks each. ``with Cluster(...)``: at the end everything of it is gone.

    The scheduler's rules are the same for every launcher. A node that is lost is replaced. If a launcher ends by
    itself, the job has failed: what is left of it is ended, and all of it is started again. ``{directory}`` in a word
    of the command is a directory of the job.
    """

    def __init__(
        self,
        launcher: str,
        command: Iterable[str],
        *,
        nodes: int,
        ranks: int = 1,
        reference: str | None,
        options: Sequence[str],
        variables: dict[str, str],
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ft-bench-"))
        self._stamps = self.directory / "stamps"
        self._mark = f"{_MARK}={self.directory.name}"
        # nothing that makes a launcher take itself for a rank; nothing of the reference where it isn't measured
        path = f"{reference}{os.pathsep}{ROOT}" if launcher == "reference" else str(ROOT)
        self._env = {**clean_environment(), **variables, _MARK: self.directory.name, "PYTHONPATH": path}
        self._env |= {name: str(self.directory) for name in ("TMPDIR", "XDG_STATE_HOME")}
        self._env |= {"FT_BENCH_STAMPS": str(self._stamps), "OMP_NUM_THREADS": "1"}
        self._env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._words = [sys.executable, *LAUNCHERS[launcher], *options]
        self._command = [word.replace("{directory}", str(self.directory)) for word in command]
        self._nodes: list[subprocess.Popen[bytes] | None] = [None] * nodes
        self._due_s = [0.0] * nodes
        """When each node without a launcher gets one."""
        self._ranks = ranks
        self._port = _free_port()

    def __enter__(self) -> Cluster:
        self.look()
        return self

    def __exit__(self, *_error: object) -> None:
        for node in self._nodes:
            if node is not None:
                node.kill()
                node.wait()
        if left := kill_matching(lambda stat: carries(stat.pid, self._mark.encode()), timeout_s=10.0):
            progress(f"processes are left: {[stat.pid for stat in left]}")
        shutil.rmtree(self.directory, ignore_errors=True)

    def stamps(self) -> list[Stamp]:
        """Return what the ranks have written so far, in whole lines."""
        found = []
        for line in self._stamps.read_text().splitlines(keepends=True) if self._stamps.exists() else ():
            if line.endswith("\n"):
                rank, pid, event, number, at = line.split()
                found.append(Stamp(int(rank), int(pid), event, int(number), int(at) / 1e9))
        return sorted(found, key=lambda stamp: stamp.at)

    def output(self) -> str:
        """Return the last lines of each node, to see why it didn't work."""
        parts = []
        for path in sorted(self.directory.glob("output-*")):
            parts += [f"{path.name}:", *path.read_text(errors="replace").splitlines()[-12:]]
        return "\n".join(parts)

    def look(self) -> None:
        """Do what the scheduler does."""
        codes = [node.poll() for node in self._nodes if node is not None]
        if failed := [code for code in codes if code is not None]:
            progress(f"a launcher has ended with {failed[0]}: the job is requeued")
            self._port = _free_port()
            for at in range(len(self._nodes)):
                self._end(at)
        for at, node in enumerate(self._nodes):
            if node is None and time.monotonic() >= self._due_s[at]:
                self._start(at)

    def _start(self, at: int) -> None:
        words = [
            *self._words,
            "--nnodes",
            str(len(self._nodes)),
            "--nproc-per-node",
            str(self._ranks),
            "--max-restarts",
            "20",
        ]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "bench"]
        with (self.directory / f"output-{at}").open("a") as output:
            self._nodes[at] = subprocess.Popen(
                [*words, *self._command],
                cwd=self.directory,
                env={**self._env, _NODE: f"n{at}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _end(self, at: int) -> None:
        """Kill everything of a node, which is replaced later."""
        node, self._nodes[at] = self._nodes[at], None
        if node is not None:
            node.kill()
            node.wait()
        job, node_mark = self._mark.encode(), f"{_NODE}=n{at}\0".encode()
        kill_matching(lambda stat: carries(stat.pid, job) and carries(stat.pid, node_mark), timeout_s=10.0)
        self._due_s[at] = time.monotonic() + _REPLACED_AFTER_S

    # -- faults -----------------------------------------------------------------------------------------------

    def lose(self, at: int) -> bool:
        """Kill everything of a node. Return False if there is no such node now."""
        if self._nodes[at] is None:
            return False
        self._end(at)
        return True

    def signal(self, rank: int, number: signal.Signals) -> bool:
        """Signal the latest process of a rank. Return False if there is none."""
        pid = {stamp.rank: stamp.pid for stamp in self.stamps() if stamp.event == "user"}.get(rank)
        if pid is None or not carries(pid, self._mark.encode()):
            return False
        os.kill(pid, number)
        return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
