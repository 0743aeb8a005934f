"""The coordinator as a process, on sockets, with stand-in launchers: the real machine of each, and no ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_ft.core.job import messages as m
from megatron_ft.core.job.restart_policy import NodeState
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.wire import encode
from tests.bench.control import Swarm


class Coordinators:
    """One listening socket, and one coordinator after the other on it."""

    def __init__(self) -> None:
        self.listener = tcp.listen("127.0.0.1", 0)
        self.listener.set_inheritable(True)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        fd = self.listener.fileno()
        words = [sys.executable, "-m", "megatron_ft.coordinator", "--listen", self.address, "--fd", str(fd), *options]
        self.process = subprocess.Popen(words, pass_fds=[fd], env=environment, text=True)
        return self.process

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.listener.close()


@pytest.fixture
def coordinators() -> Iterator[Coordinators]:
    made = Coordinators()
    yield made
    made.close()


def until(swarm: Swarm, condition: Callable[[], bool]) -> None:
    swarm.run_until(time.monotonic() + 30, condition)
    assert condition()


def test_nodes_meet_lose_one_meet_again_and_end(coordinators: Coordinators) -> None:
    process = coordinators.start()
    swarm = Swarm(coordinators.address, range(5), 5)  # one is a spare
    swarm.start()
    until(swarm, lambda: all(each.cycle == 0 for each in swarm.all[:4]))
    assert [each.place for each in swarm.all] == [0, 1, 2, 3, None]

    lost = swarm.all.pop(1)
    lost.close()  # as the kernel does for a launcher that dies
    until(swarm, lambda: all(each.cycle == 1 for each in swarm.all))
    assert [each.place for each in swarm.all] == [0, 2, 3, 1]  # the spare has the place of the lost one

    process.kill()
    process.wait()
    process = coordinators.start()
    until(swarm, lambda: all(each.member.is_led for each in swarm.all))
    assert {each.cycle for each in swarm.all} == {1}  # nobody's ranks were ended

    for each in swarm.all:
        each.do(each.member.tell(m.Report(1, NodeState.SUCCEEDED), time.monotonic()))
    until(swarm, lambda: all(each.code is not None for each in swarm.all))
    assert {each.code for each in swarm.all} == {0}
    assert process.wait(timeout=20) == 0


NO_HELLO = (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, encode({"type": "ready"}), encode({"type": "hello", "job": 7}))


def test_bytes_that_are_no_hello_end_their_own_connection_only(coordinators: Coordinators) -> None:
    coordinators.start()
    swarm = Swarm(coordinators.address, range(2), 3)
    swarm.start()
    until(swarm, lambda: all(each.cycle == 0 for each in swarm.all))
    for data in NO_HELLO:
        with socket.create_connection(coordinators.listener.getsockname(), timeout=20) as stranger:
            stranger.sendall(data)
            assert stranger.recv(100) == b""
    swarm.run_until(time.monotonic() + 0.2)
    assert all(each.member.is_led for each in swarm.all)
