"""Nodes of a job on this machine, and a scheduler that replaces lost nodes and requeues a job that has failed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megatron_ft.link.linux.processes import carries, kill_matching
from tests.bench.jobs import LAUNCHERS, MARK, Enclosure, progress
from tests.bench.stamps import Stamp, last_pids, parse

__all__ = ["REPLACED_AFTER_S", "Cluster"]

REPLACED_AFTER_S = 10.0
"""Seconds until the scheduler has another node for a lost one, or starts a requeued job."""
_NODE = "FT_BENCH_NODE"


class Cluster:
    """A job of some nodes with a rank each. ``with Cluster(...)``: at the end everything of it is gone.

    The scheduler's rules are the same for every launcher. A node that is lost is replaced. If a launcher ends by
    itself, the job has failed: what is left of it is ended, and all of it is started again.
    """

    def __init__(
        self,
        launcher: str,
        command: Sequence[str],
        *,
        nodes: int,
        reference: str,
        options: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._enclosure = Enclosure(launcher, reference)
        self.directory = self._enclosure.directory
        self._stamps = self.directory / "stamps"
        self._env = {**self._enclosure.env, **variables, "FT_BENCH_STAMPS": str(self._stamps)}
        self._env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._words = [sys.executable, *LAUNCHERS[launcher], *options]
        self._command = [word.replace("{directory}", str(self.directory)) for word in command]
        self._nodes: list[subprocess.Popen[bytes] | None] = [None] * nodes
        self._due_s = [0.0] * nodes
        """When each node without a launcher gets one."""
        self.requeues = 0
        self.ended_s: dict[int, float] = {}
        """By PID of a rank, when it was seen to be gone."""
        self._port = _free_port()

    def __enter__(self) -> Cluster:
        self.look()
        return self

    def __exit__(self, *_error: object) -> None:
        for node in self._nodes:
            if node is not None:
                node.kill()
                node.wait()
        self._enclosure.__exit__()

    def stamps(self) -> list[Stamp]:
        """Return what the ranks have written so far."""
        return parse(self._stamps.read_text()) if self._stamps.exists() else []

    def output(self) -> str:
        """Return the last lines of each node, to see why it didn't work."""
        parts = []
        for at in range(len(self._nodes)):
            path = self.directory / f"output-{at}"
            if path.exists():
                parts += [f"node {at}:", *path.read_text(errors="replace").splitlines()[-12:]]
        return "\n".join(parts)

    def look(self) -> None:
        """Do what the scheduler does, and note which ranks are gone."""
        now_s = time.monotonic()
        for pid in {stamp.pid for stamp in self.stamps()} - self.ended_s.keys():
            if not carries(pid, b"FT_BENCH_STAMPS="):
                self.ended_s[pid] = now_s
        failed = [at for at, node in enumerate(self._nodes) if node is not None and node.poll() is not None]
        if failed:
            progress(f"a launcher has ended with {self._nodes[failed[0]].returncode}: the job is requeued")  # type: ignore[union-attr]
            self._requeue(now_s)
        for at, node in enumerate(self._nodes):
            if node is None and now_s >= self._due_s[at]:
                self._start(at)

    def _start(self, at: int) -> None:
        words = [*self._words, "--nnodes", str(len(self._nodes)), "--nproc-per-node", "1", "--max-restarts", "20"]
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

    def _requeue(self, now_s: float) -> None:
        self.requeues += 1
        for at in range(len(self._nodes)):
            self._end(at)
            self._due_s[at] = now_s + REPLACED_AFTER_S
        self._port = _free_port()

    def _end(self, at: int) -> None:
        node, self._nodes[at] = self._nodes[at], None
        if node is not None:
            node.kill()
            node.wait()
        job, node_mark = f"{MARK}={self._env[MARK]}".encode(), f"{_NODE}=n{at}\0".encode()
        kill_matching(lambda stat: carries(stat.pid, job) and carries(stat.pid, node_mark), timeout_s=10.0)

    # -- faults -----------------------------------------------------------------------------------------------

    def lose(self, at: int) -> bool:
        """Kill everything of a node. Return False if there is no such node now."""
        if self._nodes[at] is None:
            return False
        self._end(at)
        self._due_s[at] = time.monotonic() + REPLACED_AFTER_S
        return True

    def signal(self, rank: int, number: signal.Signals) -> bool:
        """Signal the latest process of a rank. Return False if there is none."""
        pid = last_pids(self.stamps()).get(rank)
        if pid is None or pid in self.ended_s:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
