"""The lock at the endpoint: who takes it, the leader's process on it, and how that is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.job import leader_process
from megatron_ft.job.leader_process import LeaderProcess
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.decisions import Assignment
from megatron_ft.job.rules.etcd_keys import Seen
from megatron_ft.link import tcp
from megatron_ft.link.linux.processes import read_stat
from megatron_ft.link.reactor import Reactor
from tests.support.coordination import BOUND_S, Ear, sockets, until

SECRET = b"0123456789abcdef"
RULES = m.Rules(min_nodes=1, max_nodes=1)


def hello(*, owns: bool = True) -> m.Hello:
    return m.Hello("job", RULES, "i0", "host", owns=owns)


class Hosted:
    """A launcher that holds the endpoint's port, and the lines that it says."""

    def __init__(
        self, reactor: Reactor, listener: Any, port: int, host: str = "127.0.0.1", secret: bytes | None = None
    ) -> None:
        self.said: list[str] = []
        self.member: Any = SimpleNamespace(owns=False)
        self.address = f"{host}:{port}"
        start = m.LeaderStart(m.JobDefinition("job", RULES), secret)
        self.leader = LeaderProcess(reactor, self.member, start, self.said.append)
        self.leader.begin(Seen(self.address, 0, 0), listener)

    def pid(self) -> int:
        (pid,) = self.leader.pids()
        return pid


@contextlib.contextmanager
def hosted(reactor: Reactor, **more: Any) -> Iterator[Hosted]:
    listener = tcp.listen("127.0.0.1", 0)
    made = Hosted(reactor, listener, port_of(listener), **more)
    try:
        yield made
    finally:
        made.leader.close(is_in_a_hurry=lambda: True)
        made.leader.close(is_in_a_hurry=lambda: True)  # twice is fine


def ask(reactor: Reactor, ear: Ear, transport: Any, address: str, message: m.Hello) -> m.ToMember:
    """What a coordinator says first."""
    count = len(ear.heard_messages)
    transport.connect(address)
    until(reactor, lambda: ear.told and ear.told[-1] == "opened")
    transport.transmit(message)
    until(reactor, lambda: len(ear.heard_messages) > count)
    return ear.heard_messages[count]


def begins(reactor: Reactor, ear: Ear, transport: Any, address: str) -> Assignment:
    """Take part until a cycle begins; return what this launcher is told."""
    assert isinstance(ask(reactor, ear, transport, address, hello()), m.Admitted)
    transport.transmit(m.Ready(store="here:1"))
    until(reactor, lambda: isinstance(ear.heard_messages[-1], m.Beat))
    transport.transmit(ear.heard_messages[-1])
    until(reactor, lambda: isinstance(ear.heard_messages[-1], Assignment))
    held: Assignment = ear.heard_messages[-1]
    return held


def test_leader_is_replaced_on_its_socket_and_its_successor_knows_the_last_decision(reactor: Reactor) -> None:
    with hosted(reactor) as one, sockets(reactor) as (transport, ear):
        held = begins(reactor, ear, transport, one.address)
        assert (held.place, held.store) == (0, "here:1")
        first = one.pid()
        os.kill(first, signal.SIGKILL)
        until(reactor, lambda: ear.told[-1] == "broken")
        # to a launcher that had not heard of the decision it is told
        count = len(ear.heard_messages)
        assert isinstance(ask(reactor, ear, transport, one.address, hello()), m.Admitted)
        until(reactor, lambda: len(ear.heard_messages) > count + 1)
        assert ear.heard_messages[count + 1] == held
        assert one.pid() != first
        assert read_stat(first) is None  # it is reaped
        assert one.said == [f"the coordinator at {one.address} exited (SIGKILL); another one takes over"]


def test_leader_that_keeps_exiting_or_cannot_be_started_is_started_again_after_a_pause(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = leader_process.isolated_command
    monkeypatch.setattr(leader_process, "PAUSE_S", 0.3)
    commands = [["/no/such/program"], *[[sys.executable, "-S", "-c", "import os; os._exit(3)"]] * 9]
    began_s = time.monotonic()
    monkeypatch.setattr(leader_process, "isolated_command", lambda _: commands.pop(0))
    with hosted(reactor) as one, sockets(reactor) as (transport, ear):
        until(reactor, lambda: len(one.said) == 3)
        assert one.said == [
            f"the coordinator at {one.address} can't be started (No such file or directory); another one takes over",
            f"the coordinator at {one.address} exited (code 3); another one takes over",
            f"the coordinator at {one.address} exited (code 3); another one takes over",
        ]
        assert time.monotonic() >= began_s + 0.6
        monkeypatch.setattr(leader_process, "isolated_command", real)
        assert isinstance(ask(reactor, ear, transport, one.address, hello()), m.Admitted)


def test_first_launcher_of_a_machine_takes_the_endpoint_and_the_next_one_once_it_has_ended(reactor: Reactor) -> None:
    with hosted(reactor) as one:
        port = int(one.address.rpartition(":")[2])
        second = Hosted(reactor, None, port)
        reactor.run_until(lambda: False, time.monotonic() + 1.2)
        assert not second.member.owns
    try:
        until(reactor, lambda: second.member.owns)
        assert len(second.leader.pids()) == 1
    finally:
        second.leader.close(is_in_a_hurry=lambda: True)


def test_job_of_the_launcher_is_defined_before_another_comes_and_signals_do_not_end_its_coordinator(
    reactor: Reactor,
) -> None:
    stray = replace(hello(owns=False), job="old", instance="stray")
    with hosted(reactor) as one, sockets(reactor) as (transport, ear), sockets(reactor) as (other, its_ear):
        refusal = ask(reactor, its_ear, other, one.address, stray)
        assert isinstance(refusal, m.Dismiss)
        assert (refusal.code, "(job; this launcher's job is old)" in refusal.text) == (2, True)
        assert isinstance(ask(reactor, ear, transport, one.address, hello()), m.Admitted)
        # signals to the whole group, or to all processes of a step, don't end it
        pid = one.pid()
        assert os.getsid(pid) == pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
        assert isinstance(ask(reactor, ear, transport, one.address, hello()), m.Admitted)
        assert one.pid() == pid


def test_coordinator_has_the_secret_and_nothing_of_the_users_python(
    reactor: Reactor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random.py", "socket.py", "sitecustomize.py"):
        (tmp_path / name).write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with hosted(reactor, secret=SECRET) as one, sockets(reactor, SECRET) as (transport, ear):
        assert isinstance(ask(reactor, ear, transport, one.address, hello()), m.Admitted)
        assert one.said == []
        maps = Path(f"/proc/{one.pid()}/maps").read_text()
        assert "numpy" not in maps
        assert "torch" not in maps
    with hosted(reactor, secret=SECRET) as one, sockets(reactor) as (transport, ear):
        transport.connect(one.address)
        until(reactor, lambda: "has another secret" in str(ear.told))


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def test_port_that_is_let_go_is_taken_on_the_addresses_of_both_families(reactor: Reactor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = port_of(other)
        taken = Hosted(reactor, None, port, host="node0")
    try:
        until(reactor, lambda: taken.member.owns)
        for address in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            socket.create_connection((address, port), timeout=BOUND_S).close()
    finally:
        taken.leader.close(is_in_a_hurry=lambda: True)
