"""Pods without Kubernetes: ``ft_launcher`` as process 1 of a container with what an operator and a kubelet give it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
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


@pytest.fixture
def container() -> Sequence[str]:
    """Words that begin a command in it; skips where there can be none."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is needed")
    done = subprocess.run([*NAMESPACES, "sh", "-c", "mount -t tmpfs none /dev"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"namespaces can't be made here: {done.stderr.strip()}")
    return [*NAMESPACES, "sh", "-c", CONTAINER, "sh"]


def test_a_pod_is_replaced_and_then_all_are_stopped(
    launcher: Launcher, container: Sequence[str], tmp_path: Path
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

    def start(index: int) -> Launched:
        """As a TrainJob does: nothing is on the command line that says where it is."""
        directory = tmp_path / f"pod{len(launcher.launches)}"
        directory.mkdir()
        (directory / "termination-log").touch()
        operator = {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "JOB_COMPLETION_INDEX": str(index),
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        options = (f"--ft-log-dir={tmp_path / 'logs'}", "--max-restarts=3")
        return launcher.start(TRAINS, *options, env=operator, prefix=[*container, str(directory)])

    first, second = start(0), start(1)
    for pod in (first, second):
        pod.wait_for("^trains . of 2")
    os.kill(process_one(second), signal.SIGKILL)
    second.wait()
    replacement = start(1)
    replacement.wait_for("^trains 1 of 2")
    first.wait_for("^trains 0 of 2", count=2)
    for pod in (first, replacement):
        os.kill(process_one(pod), signal.SIGTERM)
    ended = [pod.wait() for pod in (first, replacement)]
    assert [each.code for each in ended] == [143, 143]
    assert [each.out.splitlines()[-1] for each in ended] == ["saved 0", "saved 1"]
    # what `kubectl describe pod` shows
    told = (tmp_path / "pod0" / "termination-log").read_text()
    assert told == "stopped: stopped by SIGTERM, all ranks exited with 0"
    lives = json.loads((tmp_path / "logs" / "result.json").read_text())["lives"]
    assert [life["outcome"] for life in lives] == ["stopped"]
    assert "--term-timeout 1800" in ended[0].err  # longer than a pod has
