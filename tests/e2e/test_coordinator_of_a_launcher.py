"""The coordinator process of a launcher: when it is started, how it is replaced, and whom it outlives."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from megatron_ft.core.errors import ConfigError
from megatron_ft.core.job import messages as m
from megatron_ft.core.job.decisions import AcceptorState, Assignment, Decision, DecisionKind
from megatron_ft.core.job.restart_policy import NodeState
from megatron_ft.ipc.linux.processes import read_stat, wait_gone
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.wire import encode
from megatron_ft.launcher.coordination import coordinator_process, endpoint
from megatron_ft.launcher.coordination.coordinator_process import CoordinatorProcess
from megatron_ft.launcher.coordination.endpoint import listen_anywhere, take_endpoint
from megatron_ft.link.reactor import Reactor
from tests.bench.control import Swarm
from tests.support.coordination import BOUND_S, Ear, connect, sockets, until
from tests.support.reactors import reactor

__all__ = ["reactor"]

SECRET = b"0123456789abcdef"
RULES = m.Rules(min_nodes=1, max_nodes=1)


def hello(*, session: int = 1, owns: bool = True) -> m.Hello:
    return m.Hello("job", RULES, "i0", session, "host", owns=owns)


class Hosted:
    """A `CoordinatorProcess`, and the lines that it says."""

    def __init__(self, reactor: Reactor, **more: Any) -> None:
        self.said: list[str] = []
        self.gave_up: list[str] = []
        values = {"founds": True, "is_endpoint": False, "defined": m.JobDefinition("job", RULES), **more}
        values = {"secret": None, "environ": os.environ, "led_at": lambda: "", **values}
        listener = listen_anywhere("localhost")
        self.host = CoordinatorProcess(
            reactor, listener, "localhost", say=self.said.append, gave_up=self.gave_up.append, **values
        )
        self.host.start(at_once=values["founds"])

    def pid(self) -> int:
        (pid,) = self.host.pids()
        return pid

    def close(self) -> None:
        self.host.close()
        self.host.close()  # twice is fine
        for pid in self.host.pids():
            os.kill(pid, signal.SIGKILL)
            assert self.host._process is not None
            self.host._process.wait(BOUND_S)


@contextlib.contextmanager
def hosted(reactor: Reactor, **more: Any) -> Iterator[Hosted]:
    made = Hosted(reactor, **more)
    try:
        yield made
    finally:
        made.close()


def ask(reactor: Reactor, ear: Ear, transport: Any, address: str, message: m.Hello) -> m.ToMember:
    """What a coordinator says first."""
    count = len(ear.heard_messages)
    connect(transport, ear, address)
    until(reactor, lambda: ear.told and ear.told[-1] == "opened")
    transport.transmit(message)
    until(reactor, lambda: len(ear.heard_messages) > count)
    return ear.heard_messages[count]


def test_coordinator_of_the_founder_starts_at_once_and_is_replaced_on_its_socket(reactor: Reactor) -> None:
    with hosted(reactor) as one, sockets(reactor) as (transport, ear):
        first = one.pid()
        assert isinstance(ask(reactor, ear, transport, one.host.address, hello()), m.Lead)
        os.kill(first, signal.SIGKILL)
        until(reactor, lambda: ear.told[-1] == "broken")
        connect(transport, ear, one.host.address)  # before there is another one: the socket keeps it
        until(reactor, lambda: ear.told[-1] == "opened")
        transport.transmit(hello(session=2))
        until(reactor, lambda: len(ear.heard_messages) == 2)
        assert isinstance(ear.heard_messages[1], m.Lead)
        assert one.pid() != first
        assert read_stat(first) is None  # it is reaped
        assert one.said == [f"the coordinator at {one.host.address} exited (SIGKILL); another one takes over"]
        assert one.gave_up == []


def test_launchers_that_wait_are_told_where_this_one_has_found_a_coordinator(reactor: Reactor) -> None:
    decided = Assignment(Decision(0, (0, "c", 1), DecisionKind.CYCLE, 0, 3, 3, 0), 1, votes=True)
    waiting, led_at = replace(hello(owns=False), memory=AcceptorState((0, "c"), decided)), [""]
    with hosted(reactor, founds=False, led_at=lambda: led_at[0]) as one, sockets(reactor) as (transport, ear):
        assert ask(reactor, ear, transport, one.host.address, waiting) == m.Wait(1, 3, soon=False)
        pid = one.pid()
        led_at[0] = "new:1"
        one.host.kill()
        until(reactor, lambda: ear.told[-1] == "broken")
        told = ask(reactor, ear, transport, one.host.address, waiting)
        assert replace(told, age_s=0.0) == m.Wait(1, 3, soon=False, elsewhere="new:1")
        assert 0.0 < told.age_s < BOUND_S
        assert one.pid() != pid
        assert one.said == []  # that it was killed is nobody's business


def test_coordinator_of_another_launcher_starts_on_demand_and_redirects_to_the_job(reactor: Reactor) -> None:
    with hosted(reactor, founds=False, led_at=lambda: "first:1") as one, sockets(reactor) as (transport, ear):
        reactor.run_once(0.05)
        assert one.host.pids() == set()
        told = ask(reactor, ear, transport, one.host.address, hello(owns=False))
        assert replace(told, age_s=0.0) == m.Wait(0, 0, soon=False, elsewhere="first:1")
        pid = one.pid()
        os.kill(pid, signal.SIGKILL)
        until(reactor, lambda: one.said)
        reactor.run_once(0.05)
        assert one.host.pids() == set()  # nobody needs one now
        told = ask(reactor, ear, transport, one.host.address, hello(owns=False))
        assert replace(told, age_s=0.0) == m.Wait(0, 0, soon=False, elsewhere="first:1")


def test_coordinator_that_takes_over_begins_no_job(reactor: Reactor) -> None:
    with hosted(reactor, founds=False) as one, sockets(reactor) as (transport, ear):
        assert isinstance(ask(reactor, ear, transport, one.host.address, hello()), m.Wait)


@pytest.mark.parametrize(("code", "starts"), [(3, 5), (2, 1)])
def test_coordinator_that_keeps_exiting_is_given_up(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch, code: int, starts: int
) -> None:
    monkeypatch.setattr(coordinator_process, "_PAUSES_S", (0.0, 0.01))
    monkeypatch.setattr(
        coordinator_process,
        "isolated_command",
        lambda _: [sys.executable, "-I", "-S", "-c", f"import os; os._exit({code})"],
    )
    with hosted(reactor) as one:
        until(reactor, lambda: one.gave_up)
        assert one.gave_up == [
            f"the coordinator at {one.host.address} exited (code {code}); this launcher does not start it again"
        ]
        assert len(one.said) == starts - 1
        assert one.host.pids() == set()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(tcp.parse_address(one.host.address), timeout=BOUND_S)


def test_endpoint_of_a_coordinator_that_was_given_up_is_served_again(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = coordinator_process.isolated_command
    monkeypatch.setattr(coordinator_process, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(coordinator_process, "_REST_S", 0.05)
    monkeypatch.setattr(coordinator_process, "isolated_command", lambda _: [sys.executable, "-S", "-c", "os"])
    with hosted(reactor, is_endpoint=True) as one, sockets(reactor) as (transport, ear):
        until(reactor, lambda: one.gave_up)
        rest = "this launcher does not start it again within 0.05 s"
        assert one.gave_up == [f"the coordinator at {one.host.address} exited (code 1); {rest}"]
        monkeypatch.setattr(coordinator_process, "isolated_command", real)
        assert isinstance(ask(reactor, ear, transport, one.host.address, hello()), m.Lead)
        assert len(one.gave_up) == 1


def test_job_of_the_launcher_is_defined_before_another_jobs_launcher_comes(reactor: Reactor) -> None:
    stray = replace(hello(owns=False), job="old", instance="stray")
    with hosted(reactor) as one, sockets(reactor) as (transport, ear), sockets(reactor) as (other, its_ear):
        refusal = ask(reactor, its_ear, other, one.host.address, stray)
        assert isinstance(refusal, m.Dismiss)
        assert (refusal.code, "(job; this launcher's job is old)" in refusal.text) == (2, True)
        assert isinstance(ask(reactor, ear, transport, one.host.address, hello()), m.Lead)


def test_coordinator_that_cannot_be_started_is_given_up(reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_process, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(coordinator_process, "isolated_command", lambda _: ["/no/such/program"])
    with hosted(reactor) as one:
        until(reactor, lambda: one.gave_up)
        assert "can't be started (No such file or directory)" in one.gave_up[0]


def test_coordinator_has_the_secret_and_nothing_of_the_users_python(
    reactor: Reactor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random.py", "socket.py", "sitecustomize.py"):
        (tmp_path / name).write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "FT_SECRET_FILE": "/no/such/file"}
    with hosted(reactor, secret=SECRET, environ=environ) as one, sockets(reactor, SECRET) as (transport, ear):
        assert isinstance(ask(reactor, ear, transport, one.host.address, hello()), m.Lead)
        assert one.said == []
        maps = Path(f"/proc/{one.pid()}/maps").read_text()
        assert "numpy" not in maps
        assert "torch" not in maps
    with hosted(reactor, secret=SECRET) as one, sockets(reactor) as (transport, ear):
        connect(transport, ear, one.host.address)
        until(reactor, lambda: "asks for the job's secret" in str(ear.told))


def test_signals_to_the_whole_group_do_not_end_it(reactor: Reactor) -> None:
    with hosted(reactor) as one, sockets(reactor) as (transport, ear):
        assert isinstance(ask(reactor, ear, transport, one.host.address, hello()), m.Lead)
        pid = one.pid()
        assert os.getsid(pid) == pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
        assert isinstance(ask(reactor, ear, transport, one.host.address, hello(session=2)), m.Lead)
        assert one.pid() == pid


def test_coordinator_without_a_free_descriptor_still_says_which_options_differ(reactor: Reactor) -> None:
    with hosted(reactor) as one, sockets(reactor) as (transport, ear), sockets(reactor) as (other, its_ear):
        assert isinstance(ask(reactor, ear, transport, one.host.address, hello()), m.Lead)
        pid = one.pid()
        connect(other, its_ear, one.host.address)
        until(reactor, lambda: its_ear.told == ["opened"])
        # it is taken in, and the answer shows it
        connect(transport, ear, one.host.address)
        until(reactor, lambda: ear.told[-1] == "opened")
        transport.transmit(hello(session=2))
        until(reactor, lambda: len(ear.heard_messages) >= 2)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))  # what is open stays open
        other.transmit(replace(hello(), instance="other", rules=replace(RULES, max_restarts=7)))
        until(reactor, lambda: its_ear.heard_messages)
        (refusal,) = its_ear.heard_messages
        assert isinstance(refusal, m.Dismiss)
        assert "--max-restarts" in refusal.text
        assert one.pid() == pid


LAUNCHER = """
import os, sys
from megatron_ft.core.job import messages as m
from megatron_ft.launcher.coordination.endpoint import listen_anywhere
from megatron_ft.launcher.coordination.coordinator_process import CoordinatorProcess
from megatron_ft.link.reactor import Reactor
reactor = Reactor()
job = dict(defined=m.JobDefinition("bench", m.Rules(3, 3, max_restarts=10)), founds=True, is_endpoint=True)
more = dict(**job, secret=None, environ=os.environ, led_at=str, say=print, gave_up=print)
host = CoordinatorProcess(reactor, listen_anywhere("localhost"), "localhost", **more)
host.start(at_once=True)
print(host.address, *host.pids(), flush=True)
reactor.watch(0, lambda: (host.close(), sys.exit()))
while True:
    reactor.run_once(None)
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_coordinator_outlives_its_launcher_only_while_others_need_it(is_killed: bool) -> None:
    words = [sys.executable, "-c", LAUNCHER]
    launcher = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    address, text = launcher.stdout.readline().split()
    pidfd = os.pidfd_open(int(text))
    with launcher:
        try:
            swarm = Swarm(address, range(4), 4, can_coordinate=address)
            swarm.all[0].member.owns(address)
            swarm.start()
            swarm.run_until(time.monotonic() + BOUND_S, lambda: all(each.cycle == 0 for each in swarm.all[:3]))
            assert [each.cycle for each in swarm.all[:3]] == [0, 0, 0]
            if is_killed:
                resource.prlimit(int(text), resource.RLIMIT_NOFILE, (3, 3))  # it can't open anything more
                launcher.kill()
            else:
                launcher.stdin.close()
            assert launcher.wait(BOUND_S) == (-signal.SIGKILL if is_killed else 0)
            assert launcher.stderr.read() == ""  # it ends with the launcher for who reads it
            swarm.all.pop(0).close()
            swarm.run_until(time.monotonic() + BOUND_S, lambda: all(each.cycle == 1 for each in swarm.all))
            assert [each.cycle for each in swarm.all] == [1, 1, 1]  # the spare is in its place
            for each in swarm.all:
                each.do(each.member.tell(m.Report(1, NodeState.SUCCEEDED), time.monotonic()))
            swarm.run_until(time.monotonic() + BOUND_S, lambda: all(each.code is not None for each in swarm.all))
            assert [each.code for each in swarm.all] == [0, 0, 0]
            assert wait_gone(pidfd, BOUND_S)
        finally:
            launcher.kill()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def test_the_endpoint_is_taken_by_the_first_launcher_of_a_machine(reactor: Reactor) -> None:
    with hosted(reactor) as one:
        port = int(one.host.address.rpartition(":")[2])
        assert take_endpoint("localhost", port) is None  # it waits until the coordinator has started
        with hosted(reactor, secret=SECRET) as two:
            assert take_endpoint("127.0.0.1", int(two.host.address.rpartition(":")[2])) is None
    taken = take_endpoint("localhost", 0)
    assert taken is not None
    assert port_of(taken) > 0
    taken.close()


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"", None])
def test_a_port_that_another_program_has_is_a_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr(endpoint, "_CERTAIN_S", 0.1)
    monkeypatch.setattr(endpoint, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with other.accept()[0] as sock:
                        sock.sendall(answer or b"")
                        if answer is None:
                            sock.recv(1 << 16)
                            sock.recv(1)  # says nothing

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint_text = f"has the port of the rendezvous endpoint localhost:{port_of(other)} on this machine"
        who = rf"another program \(.*, pid {os.getpid()}, listening on 127.0.0.1\)"
        with pytest.raises(ConfigError, match=f"^{who} {endpoint_text}: end it, or choose another port$"):
            take_endpoint("localhost", port_of(other))
        other.shutdown(socket.SHUT_RDWR)
        thread.join(BOUND_S)


def test_port_that_another_jobs_coordinator_has_where_no_peer_comes_is_a_mistake_that_names_it(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_CERTAIN_S", 0.2)
    monkeypatch.setattr(endpoint, "_peers_addresses", lambda _host: ["127.0.0.2"])
    with hosted(reactor, defined=m.JobDefinition("7/0//other.py", RULES)) as one:  # at 127.0.0.1
        port = int(one.host.address.rpartition(":")[2])
        who = r"a coordinator of job 7/0//other.py \(.*, pid \d+, listening on 127.0.0.1\)"
        with pytest.raises(ConfigError, match=f"^{who} has the port of the rendezvous endpoint node0:{port} on this"):
            take_endpoint("node0", port)


@pytest.mark.parametrize(
    ("addresses", "is_refused"),
    [
        (["127.0.0.2", "192.0.2.9"], True),
        (["127.0.0.2", "127.0.0.3"], False),  # all are this host's
        (["192.0.2.9", "192.0.2.8"], False),  # none is
        (["127.0.0.2", "192.0.2.66"], False),  # no host is there
    ],
)
def test_endpoint_whose_name_is_also_that_of_other_hosts_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], is_refused: bool
) -> None:
    found = [(socket.AF_INET, 0, 0, "", (each, 1)) for each in addresses]
    monkeypatch.setattr(tcp, "look_up", lambda *_: found)
    monkeypatch.setattr(endpoint, "_is_alive", lambda address, _port: address != "192.0.2.66")
    if not is_refused:
        endpoint.check_names_one_host("service", 1)
        return
    told = (
        r"service is the name of this host and of others \(192.0.2.9\): name one host, or set --rdzv-conf is_host=true"
    )
    with pytest.raises(ConfigError, match=told):
        endpoint.check_names_one_host("service", 1)


def test_host_is_alive_if_it_answers_with_or_without_a_listening_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = port_of(other)
        assert endpoint._is_alive("127.0.0.1", port)
    assert endpoint._is_alive("127.0.0.1", port)
    assert not endpoint._is_alive("no.such.host.invalid", port)


def test_port_that_is_let_go_within_the_bound_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_peers_addresses", lambda _host: ["127.0.0.2"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = port_of(other)
        threading.Timer(1.2, other.close).start()
        taken = take_endpoint("node0", port)
        assert taken is not None
        taken.close()


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        (["192.0.2.9"], ["192.0.2.9"]),
        (["127.0.1.1", "192.0.2.9", "192.0.2.9"], ["192.0.2.9"]),
        (["127.0.1.1"], ["192.0.2.1"]),  # as other nodes know it
        ([], ["192.0.2.1"]),
    ],
)
def test_endpoint_is_asked_at_the_addresses_that_peers_use(
    monkeypatch: pytest.MonkeyPatch, found: list[str], asked: list[str]
) -> None:
    monkeypatch.setattr(tcp, "look_up", lambda *_: [(0, 0, 0, "", (each, 0)) for each in found])
    monkeypatch.setattr(endpoint, "own_end", lambda *_: "192.0.2.1")
    assert endpoint._peers_addresses("node0") == asked
    assert endpoint._peers_addresses("localhost") == ["127.0.0.1"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_an_endpoint_is_reached_by_its_addresses_of_both_families() -> None:
    taken = take_endpoint("node0", 0)
    assert taken is not None
    with taken, listen_anywhere("node0") as free:
        for port in (port_of(taken), port_of(free)):
            for address in ("127.0.0.1", "::1"):
                socket.create_connection((address, port), timeout=BOUND_S).close()


def test_an_endpoint_that_can_not_be_had_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tcp, "listen", forbidden)
    with pytest.raises(ConfigError, match="the rendezvous endpoint node0:80 can't be used: Permission denied"):
        take_endpoint("node0", 80)


def test_a_coordinator_whose_job_has_ended_is_waited_for() -> None:
    with tcp.listen("127.0.0.1", 0) as old:
        asked = threading.Event()

        def stay_and_go() -> None:
            old.setblocking(True)
            for _ in range(2):
                with old.accept()[0] as sock:
                    sock.sendall(encode({"type": "open", "over": True}))
                    sock.recv(1 << 16)
                asked.set()
            old.close()

        thread = threading.Thread(target=stay_and_go)
        port = port_of(old)
        thread.start()
        taken = take_endpoint("localhost", port)
        assert asked.is_set()
        assert taken is not None
        assert port_of(taken) == port
        taken.close()
        thread.join(BOUND_S)
