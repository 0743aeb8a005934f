"""Pods without Kubernetes: ``ft_launcher`` as process 1 of a container with what an operator and a kubelet give it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_process_one import process_one
from tests.support.launching import Launched, Launcher

# a /dev of its own, as containers have it, with the file that the kubelet reads
CONTAINER = """
mkdir "$1/dev" && mount --rbind /dev "$1/dev" && mount -t tmpfs none /dev
for each in null zero full random urandom termination-log; do touch /dev/$each; done
for each in null zero full random urandom; do mount --bind "$1/dev/$each" /dev/$each; done
mkdir /dev/shm && mount -t tmpfs none /dev/shm
mount --bind "$1/termination-log" /dev/termination-log
umount --lazy "$1/dev"
mount -t tmpfs none "$TMPDIR"
shift
exec "$@"
"""
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
TRAINS = """
def save(*_):
    say("saved", RANK)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
say("trains", RANK, "of", os.environ["WORLD_SIZE"])
forever()
"""


class Pods:
    """Of one job; those with the same index are one after the other."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self._launcher, self._directory = launcher, directory
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]

    def start(self, script: str, *options: str, index: int = 0, count: int = 1) -> Launched:
        """As a TrainJob does: nothing is on the command line that says where it is."""
        directory = self._directory / f"pod{len(self._launcher.launches)}"
        directory.mkdir()
        (directory / "termination-log").touch()
        operator = {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "JOB_COMPLETION_INDEX": str(index),
            "PET_NNODES": str(count),
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(self._port),
        }
        shared = f"--ft-log-dir={self._directory / 'logs'}"
        prefix = [*NAMESPACES, "sh", "-c", CONTAINER, "sh", str(directory)]
        return self._launcher.start(script, shared, "--max-restarts=3", *options, env=operator, prefix=prefix)

    def why(self, pod: Launched) -> str:
        """What ``kubectl describe pod`` shows."""
        return (self._directory / f"pod{self._launcher.launches.index(pod)}" / "termination-log").read_text()

    @property
    def outcomes(self) -> list[str]:
        """As in result.json."""
        return [life["outcome"] for life in json.loads((self._directory / "logs" / "result.json").read_text())["lives"]]


@pytest.fixture
def pods(launcher: Launcher, tmp_path: Path) -> Pods:
    """Skips where there can be no container."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is needed")
    done = subprocess.run([*NAMESPACES, "sh", "-c", "mount -t tmpfs none /dev"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"namespaces can't be made here: {done.stderr.strip()}")
    return Pods(launcher, tmp_path)


def test_a_pod_is_replaced_and_then_all_are_stopped(pods: Pods) -> None:
    first, second = (pods.start(TRAINS, index=index, count=2) for index in range(2))
    for pod in (first, second):
        pod.wait_for("^trains . of 2")
    os.kill(process_one(second), signal.SIGKILL)
    second.wait()
    replacement = pods.start(TRAINS, index=1, count=2)
    replacement.wait_for("^trains 1 of 2")
    first.wait_for("^trains 0 of 2", count=2)
    for pod in (first, replacement):
        os.kill(process_one(pod), signal.SIGTERM)
    ended = [pod.wait() for pod in (first, replacement)]
    assert [each.code for each in ended] == [143, 143]
    assert [each.out.splitlines()[-1] for each in ended] == ["saved 0", "saved 1"]
    assert pods.why(first) == "stopped: stopped by SIGTERM, all ranks exited with 0"
    assert pods.outcomes == ["stopped"]
    assert "--term-timeout 1800" in ended[0].err  # longer than a pod has
