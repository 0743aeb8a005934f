"""Jobs whose leader is named in etcd: a real etcd, real launchers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.etcd_server import EtcdServer
from tests.support.launching import Launched, Launcher, wait_until
from tests.support.nodes import TRAINS_UNTIL_TOLD, coordinator_of

pytestmark = pytest.mark.waits


class Job:
    """Launchers that meet by an etcd."""

    def __init__(self, launcher: Launcher, etcd: EtcdServer, *options: str, settings: str = "") -> None:
        self.nodes: list[Launched] = []
        self._launcher = launcher
        endpoint = f"--rdzv-endpoint={etcd.endpoint}"
        conf = f"--rdzv-conf=last_call_timeout=2{settings}"
        self._options = ["--rdzv-backend=etcd", endpoint, "--rdzv-id=job", "--max-restarts=3", conf, *options]

    def start(self, count: int = 1, *, prefix: Sequence[str] = ()) -> None:
        for _ in range(count):
            options = [*self._options, f"--node-rank={len(self.nodes)}"]
            where = [str(self._launcher.directory)]
            self.nodes.append(self._launcher.start(TRAINS_UNTIL_TOLD, *options, script_args=where, prefix=prefix))

    def leader(self) -> Launched:
        """Wait for the launcher that has the leader's process, and return it."""
        found: list[Launched] = []

        def is_there() -> bool:
            found[:] = [node for node in self.nodes if node.process.poll() is None and coordinator_of(node)]
            return len(found) == 1

        wait_until(is_there, 30)
        return found[0]

    def finish(self) -> None:
        (self._launcher.directory / "finish").touch()

    def all_train(self, cycle: int, *, nodes: list[Launched] | None = None) -> None:
        """Wait for that cycle on all nodes that are left, in any order of places."""
        nodes = self.nodes if nodes is None else nodes
        for node in nodes:
            node.wait_for(rf"^cycle {cycle} of \d+ in {len(nodes)} at ", timeout_s=90.0)

    def cycles(self) -> int:
        """Number of cycles that any node has begun."""
        return max(len(re.findall("^cycle ", node.out, re.MULTILINE)) for node in self.nodes)


def lose(node: Launched) -> None:
    """End all processes of a node at once, as if its host were off."""
    pids = [stat.pid for stat in node.alive()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    for name in os.listdir(node.temp_dir):  # the host's disk is gone, too
        shutil.rmtree(os.path.join(node.temp_dir, name))


def leader_pid(node: Launched) -> int:
    pid = coordinator_of(node)
    assert pid is not None
    return pid


def ended(job: Job, nodes: list[Launched] | None = None) -> list[int]:
    """Have all ranks end; the codes of these launchers."""
    job.finish()
    return [node.wait().code for node in nodes or job.nodes]


def test_two_of_four_nodes_are_lost_with_the_leader_and_the_others_go_on(launcher: Launcher, etcd: EtcdServer) -> None:
    job = Job(launcher, etcd, "--nnodes=2:4")
    job.start(4)
    job.all_train(0)
    first = job.leader()
    second = next(node for node in job.nodes if node is not first)
    for lost in (first, second):
        lose(lost)
    left = [node for node in job.nodes if node not in (first, second)]
    job.all_train(1, nodes=left)
    assert ended(job, left) == [0, 0]


def test_leader_that_is_killed_or_paused_beyond_its_lease_is_replaced_and_ranks_notice_nothing(
    launcher: Launcher, etcd: EtcdServer
) -> None:
    job = Job(launcher, etcd, "--nnodes=3")
    job.start(3)
    job.all_train(0)
    leader = job.leader()
    os.kill(leader_pid(leader), signal.SIGKILL)
    leader.wait_for("; another one takes over")
    paused = leader_pid(job.leader())
    os.kill(paused, signal.SIGSTOP)
    wait_until(lambda: not Path(f"/proc/{paused}").exists(), 30)
    assert leader_pid(job.leader()) != paused
    time.sleep(13)  # for longer than the next leader waits for launchers that haven't come
    assert job.cycles() == 1
    (launcher.directory / "fail-0-0").touch()
    job.all_train(1)
    assert ended(job) == [0, 0, 0]


def test_no_node_is_lost_while_etcd_is_paused_or_away_and_a_restart_waits_for_it(
    launcher: Launcher, etcd: EtcdServer
) -> None:
    job = Job(launcher, etcd, "--nnodes=2")
    job.start(2)
    job.all_train(0)
    etcd.pause()
    time.sleep(15)  # longer than the lease
    etcd.resume()
    time.sleep(20)  # longer than the next leader waits for launchers that haven't come
    assert job.cycles() == 1
    etcd.kill()
    away_s = time.monotonic()
    time.sleep(15)
    (launcher.directory / "fail-0-1").touch()
    time.sleep(15)
    assert job.cycles() == 1
    etcd.start()
    job.all_train(1)
    assert time.monotonic() - away_s > 30
    assert ended(job) == [0, 0]
    assert [node.events("node_lost") for node in job.nodes] == [[], []]
    assert "2 of 3 restarts left" in job.nodes[0].err


def test_name_of_a_job_that_has_ended_or_lost_all_nodes_is_used_again(launcher: Launcher, etcd: EtcdServer) -> None:
    job = Job(launcher, etcd, "--nnodes=2")
    job.start(2)
    job.all_train(0)
    again = Job(launcher, etcd, "--nnodes=2")  # by a shell that is older than the end of the run before
    waits = 'until [ -e "$0" ]; do sleep 0.1; done; exec "$@"'
    again.start(2, prefix=["bash", "-c", waits, str(launcher.directory / "again")])
    (launcher.directory / "fail-0-1").touch()
    job.all_train(1)
    assert ended(job) == [0, 0]
    etcd.kill()
    etcd.start()  # all of its leases begin anew
    for name in ("finish", "fail-0-1"):
        (launcher.directory / name).unlink()
    (launcher.directory / "again").touch()
    again.all_train(0)
    for node in again.nodes:
        lose(node)
    third = Job(launcher, etcd, "--nnodes=2")
    third.start(2)
    third.all_train(0)
    assert ended(third) == [0, 0]
