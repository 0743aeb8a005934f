"""The real monitor of a real rank, with the test in the launcher's place: it holds all that a launcher holds."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ft.config.files.yaml_file import FaultToleranceConfig
from megatron_ft.link.wire import Channel, ChannelClosedError, close_fds, listen
from megatron_ft.monitor import process as monitor_process
from tests.support.monitored import rank

CYCLE = 1
HEALTHY = """
import threading
client.init_workload_monitoring()
told_to_hang = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), told_to_hang.set()), daemon=True).start()
say('ready')
number = 0
while not told_to_hang.is_set():
    client.set_iteration(number)
    with client.section('step'):
        time.sleep(0.02)
    number += 1
client.start_section('step')
say('hanging')
while True: signal.pause()
"""
"""A rank that trains until it gets a line on its standard input; then it hangs."""


class Watched:
    """One rank, its monitor, and the launcher's end of their channel."""

    def __init__(self, directory: Path, script: str, timeout_s: float) -> None:
        self.path = str(directory / "monitor.sock")
        self.log_dir = directory / "logs"
        self.log_dir.mkdir()
        self.heard: list[dict[str, Any]] = []
        self.fds: tuple[int, ...] = ()
        """Board, wake-up, pidfd, stacks, questions: once the rank is attached."""
        self._listener, self._stack = listen(self.path), contextlib.ExitStack()
        config = FaultToleranceConfig(rank_section_timeouts={"step": timeout_s}, rank_out_of_section_timeout=timeout_s)
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.monitor = monitor_process.spawn(
            listen_fd=self._listener.fileno(),
            socket_path=self.path,
            local_rank=0,
            launcher_fd=theirs.fileno(),
            options=monitor_process.MonitorOptions(config=config, log_dir=str(self.log_dir), log_max_bytes=2_000_000),
        )
        theirs.close()
        self.rank = self._stack.enter_context(rank(self.path, script, {"FT_CYCLE": str(CYCLE)}))
        self.channel.send({"type": "guard_group", "pid": self.rank.pid})

    def said(self, kind: str) -> list[dict[str, Any]]:
        """What the monitor has said of that kind until now."""
        try:
            for message, fds in self.channel.receive():
                if message.name not in ("observation", "first_step"):
                    self.heard.append(json.loads(message.body))
                if message.name == "attached":
                    self.fds = fds
                else:
                    close_fds(fds)
        except ChannelClosedError:
            pass  # what it said before is kept
        return [message for message in self.heard if message["type"] == kind]

    def wait_for(self, kind: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The first message of that kind."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.said(kind)):
            assert time.monotonic() < deadline, f"no {kind} came, only {[m['type'] for m in self.heard]}"
            assert self.monitor.poll() is None, "the monitor has ended"
            select.select([self.channel], [], [], 0.1)
        return found[0]

    def check(self) -> None:
        """Both live, and nobody was found hung."""
        assert self.monitor.poll() is None, f"the monitor ended with {self.monitor.returncode}"
        assert self.rank.poll() is None, f"the rank ended with {self.rank.returncode}: {self.said('verdict')}"
        assert not self.said("verdict"), self.said("verdict")

    def hang(self) -> dict[str, Any]:
        """Let the rank hang; the verdict on it, after which it is gone."""
        self.check()
        assert self.rank.stdin is not None
        self.rank.stdin.write("\n")
        self.rank.stdin.flush()
        verdict = self.wait_for("verdict")
        assert self.rank.wait(60) == -signal.SIGKILL
        return verdict

    def close(self) -> None:
        with contextlib.suppress(ChannelClosedError):
            self.channel.send({"type": "stop"})
        self._stack.close()
        try:
            self.monitor.wait(30)
        finally:
            self.monitor.kill()
            self.monitor.wait()
            self.channel.close()
            close_fds(self.fds)
            self._listener.close()


@contextlib.contextmanager
def watched(directory: Path, script: str = HEALTHY, *, timeout_s: float = 5.0) -> Iterator[Watched]:
    """A rank and its monitor, attached; ended afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    both = Watched(directory, script, timeout_s)
    try:
        both.wait_for("attached")
        yield both
    finally:
        both.close()


def figures(pid: int, log_dir: Path) -> dict[str, int]:
    """What must not grow: memory, descriptors, bytes and files of the logs."""
    sizes = []
    for entry in log_dir.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has just made place for a newer one
            sizes.append(entry.stat().st_size if entry.is_file() else 0)
    more = {"fds": len(os.listdir(f"/proc/{pid}/fd")), "log_bytes": sum(sizes), "log_files": len(sizes)}
    return {**memory_kib(pid), **more}


def memory_kib(pid: int) -> dict[str, int]:
    """Memory: "pss_kib" also moves with how many processes share libraries at the moment; "own_kib" doesn't."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        kib = {line.split()[0]: int(line.split()[1]) for line in file if line.endswith("kB\n")}
    return {"pss_kib": kib["Pss:"], "own_kib": kib["Anonymous:"]}
