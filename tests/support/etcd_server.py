"""A real etcd on this machine, if it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_ft.job.etcd_client import EtcdClient
from megatron_ft.job.rules.etcd_keys import EtcdAway, look
from megatron_ft.job.rules.messages import EtcdSettings
from tests.support.launching import free_port, wait_until

__all__ = ["EtcdServer", "etcd", "start_etcd"]

BINARY = shutil.which("etcd")
_BOUND_S = 30.0


class EtcdServer:
    """One etcd; ``options`` are those of its command line; ``prefix`` are words of a command that becomes it."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        host: str = "127.0.0.1",
        protocol: str = "http",
        prefix: Sequence[str] = (),
    ) -> None:
        self._prefix = prefix
        self.host, self.port, self._peers = host, free_port(), free_port()
        self._directory, self._options, self._protocol = directory, options, protocol
        self.start()

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Start it, with what an earlier process of it has kept."""
        assert BINARY is not None
        url, peers = f"{self._protocol}://{self.host}:{self.port}", f"http://127.0.0.1:{self._peers}"
        words = ["--data-dir", str(self._directory / "etcd"), "--logger", "zap", "--log-outputs", "stderr"]
        words += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peers]
        words += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        with open(self._directory / "etcd.log", "ab") as log:
            self.process = subprocess.Popen([*self._prefix, BINARY, *words, *self._options], stdout=log, stderr=log)

    def wait_until_up(self, client: EtcdClient | None = None) -> None:
        client = client or EtcdClient(EtcdSettings(self.host, self.port))
        wait_until(lambda: _answers(client), _BOUND_S)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # all of its threads have stopped

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_etcd(tmp_path: Path) -> Iterator[Callable[..., EtcdServer]]:
    """Start an etcd with options, which ends with the test."""
    if BINARY is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    started: list[EtcdServer] = []

    def start(*options: str, **more: str) -> EtcdServer:
        directory = tmp_path / f"etcd{len(started)}"
        directory.mkdir()
        started.append(EtcdServer(directory, *options, **more))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def etcd(start_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """An etcd that answers."""
    server = start_etcd()
    server.wait_until_up()
    return server


def _answers(client: EtcdClient) -> bool:
    try:
        look(client, "none")
    except EtcdAway:
        return False
    return True
