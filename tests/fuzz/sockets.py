"""Each of our sockets under attack, with a healthy rank behind it that must neither die nor be left alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_ft.config.kinds import DEFAULT_LOG_MAX_BYTES
from megatron_ft.job.leader_process import LeaderProcess
from megatron_ft.job.rules import messages as m
from megatron_ft.job.rules.etcd_keys import Seen
from megatron_ft.link import tcp
from megatron_ft.link.messages import control_messages
from megatron_ft.link.messages.rank_messages import FROM_RANK, Question
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.secure_channel import Challenge, Proof
from megatron_ft.link.wire import encode
from tests.fuzz.hostile import Hostile, examples
from tests.fuzz.watched import figures, memory_kib, watched
from tests.support.coordination import sockets, until
from tests.support.launching import Launched

Say = Callable[[str], None]
_ANSWER_S = 60.0
"""A peer that neither answers nor hangs up for so long hangs itself. It is waited for on loaded machines, too."""
HELLOS = examples(FROM_RANK.kinds.values())
REQUESTS = examples(control_messages.REQUESTS.kinds.values())
_LEFT_OPEN = 300
_LOOK_EVERY = 500
_MORE_KIB = 12_000
"""What a process may have grown by: its first warnings, its evidence, Python's free lists."""
_MOST_LINES = 60
_KINDS_OF_LINES = 6
_MOST_QUESTION = 300
_CALLERS = 2 * 16
"""Descriptors of connections that a monitor keeps open at most."""
_SECRET = b"fuzzing-fuzzing-fuzzing"
_JOB = m.JobDefinition("fuzz", m.Rules(1, 1))
_TO_COORDINATOR = (Challenge, Proof, m.Hello, m.Beat, m.Shutdown, m.Goodbye)


def storm(
    reach: Callable[[], socket.socket], hostile: Hostile, messages: int, rng: random.Random, look: Callable[[], object]
) -> str:
    """Send that many messages, hundreds of connections open at once; ``look`` is called now and then, and may raise.

    Raises:
        TimeoutError: the peer doesn't accept, or neither answers nor hangs up.
    """
    sent = connections = answered = 0
    left: deque[socket.socket] = deque()
    with open(os.devnull) as nothing:
        while sent < messages:
            count, ending = rng.choice((1, 1, 1, 2, 3, 8, 30)), rng.choices(("close", "read", "leave"), (60, 30, 10))[0]
            data, fds = hostile.data(count), [nothing.fileno()] * (rng.randrange(1, 20) if rng.random() < 0.05 else 0)
            cut = rng.randrange(len(data)) if rng.random() < 0.4 else len(data)
            sock = reach()
            try:
                if fds and sock.family == socket.AF_UNIX:
                    cut = socket.send_fds(sock, [data[:cut]], fds)
                else:
                    sock.sendall(data[:cut])
                sock.sendall(data[cut:])
                if ending == "read":
                    sock.shutdown(socket.SHUT_WR)
                    answered += bool(sock.recv(1 << 16))
                    while sock.recv(1 << 16):
                        pass
            except TimeoutError:
                raise
            except OSError:
                ending = "close"  # the peer has hung up meanwhile, as it may
            if ending == "leave":
                left.append(sock)
            else:
                sock.close()
            if len(left) > _LEFT_OPEN:
                left[rng.randrange(len(left))].close()
                left.popleft().close()
            sent, connections = sent + count, connections + 1
            if connections % _LOOK_EVERY == 0:
                look()
    for sock in left:
        sock.close()
    return f"{sent} messages on {connections} connections, {answered} of them answered"


def exchange(path: str, message: dict[str, object]) -> bytes:
    """An honest question, and the raw answer to it.

    Raises:
        TimeoutError: none came.
        struct.error, ConnectionError: the peer hung up.
    """
    with _reach(path) as sock:
        sock.sendall(encode(message))
        head = sock.recv(4, socket.MSG_WAITALL)
        return sock.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL)


def _reach(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_ANSWER_S)
    end = time.monotonic() + _ANSWER_S
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:  # its queue is full
            if time.monotonic() > end:
                raise TimeoutError("nobody accepts") from None
            time.sleep(0.001)
        else:
            return sock


def attack_monitor(
    directory: Path, seed: int, say: Say, *, hellos: int, questions: int, timeout_s: float = 5.0
) -> None:
    """The socket of the monitor, and the socket on which it asks the rank.

    Raises:
        AssertionError, TimeoutError: it did harm.
    """
    rng, began = random.Random(seed), time.monotonic()
    with watched(directory, timeout_s=timeout_s) as both:
        before = figures(both.monitor.pid, both.log_dir)
        say(f"rank -> monitor: {storm(partial(_reach, both.path), Hostile(rng, HELLOS), hellos, rng, both.check)}")
        _ask(both.fds[4], Hostile(rng, examples([Question])), questions)
        say(f"monitor -> rank: {questions} questions, and the next one is answered")
        both.check()
        after = figures(both.monitor.pid, both.log_dir)
        say(f"the monitor before: {before}, after: {after}")
        assert after["own_kib"] < before["own_kib"] + _MORE_KIB, (before, after)
        assert after["fds"] <= before["fds"] + _CALLERS, (before, after)
        warnings = [message["text"] for message in both.said("warning")]
        assert any("refused a connection" in text for text in warnings), warnings
        most = _MOST_LINES + _KINDS_OF_LINES * (time.monotonic() - began) / 60
        assert len(warnings) < most, len(warnings)
        verdict = both.hang()
        say(f"the rank then hung, and was found after {verdict['elapsed_s']:.1f} s; {len(warnings)} warnings in all")


def attack_launcher(directory: Path, seed: int, say: Say, *, requests: int) -> None:
    """The launcher's control socket.

    Raises:
        AssertionError, TimeoutError: it did harm.
    """
    rng = random.Random(seed)
    script, flag = directory / "train.py", directory / "hang"
    script.write_text(_SCRIPT)
    config = ["--ft-rank_section_timeouts=step:5", "--ft-rank_out_of_section_timeout=none"]
    launched = Launched(directory, ["--nproc-per-node=1", "--max-restarts=0", *config, str(script), str(flag)], {})
    try:
        (control,) = launched.wait_for(r"^socket (.*)$")
        (monitor_pid,) = launched.monitor_pids().values()
        pids = {"launcher": launched.process.pid, "monitor": monitor_pid}
        before = {name: figures(pid, launched.log_dir) for name, pid in pids.items()}

        def look() -> None:
            assert launched.process.poll() is None, launched.err[-3000:]
            # the rank's end would be the job's, and another monitor has another number
            assert os.path.exists(f"/proc/{monitor_pid}"), launched.err[-3000:]

        hostile = Hostile(rng, REQUESTS, _is_harmless)
        say(f"rank -> launcher: {storm(partial(_reach, control), hostile, requests, rng, look)}")
        exchange(control, {"type": "resume"})
        answer = json.loads(exchange(control, {"type": "status"}))
        (rank,) = answer["ranks"]
        # a field at its default isn't sent
        found = (answer["phase"], answer.get("cycle", 0), rank.get("exit_code"), rank.get("hung", False))
        assert found == ("running", 0, None, False)
        look()
        for name, pid in pids.items():
            after = figures(pid, launched.log_dir)
            say(f"the {name} before: {before[name]}, after: {after}")
            assert after["own_kib"] < before[name]["own_kib"] + 2 * _MORE_KIB, (before, after)
            # of three processes; the newest record may be the one too many
            assert after["log_bytes"] < 2.2 * 3 * DEFAULT_LOG_MAX_BYTES, after
        flag.touch()
        finished = launched.wait(120)
        assert finished.code == 1, finished.err[-3000:]
        assert "Traceback" not in finished.err, finished.err[-3000:]
        assert any("hung in 'step'" in line for line in finished.lines), finished.lines[-5:]
        # each kind of them comes once a minute in the long run
        most = _MOST_LINES + _KINDS_OF_LINES * finished.seconds / 60
        assert len(finished.lines) < most, (len(finished.lines), finished.seconds)
        assert all(len(line) < 1200 for line in finished.lines)
        say(f"the rank then hung, and was found; {len(finished.lines)} lines in all")
    finally:
        launched.destroy()


_SCRIPT = """
import os, sys, time
from megatron_ft import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
print("socket", os.environ["FT_LAUNCHER_IPC_SOCKET"], flush=True)
while not os.path.exists(sys.argv[1]):
    for _ in range(1000):
        with client.section("step"):
            pass
    client._wake_monitor()  # else most of them would be overwritten before it looks
    with client.section("step"):
        time.sleep(0.02)
client.start_section("step")
while True:
    time.sleep(1)
"""


def _is_harmless(message: dict[str, Any]) -> bool:
    """Whether a request doesn't end the job when it is obeyed."""
    return message.get("action") not in ("ShutdownWorkload", "ExcludeThisNode")


def _ask(fd: int, hostile: Hostile, count: int) -> None:
    """Questions that are none, and then one that is."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.setblocking(False)
        for _ in range(count):
            _put(sock, hostile.data(1)[4:_MOST_QUESTION])
            _take(sock)
        _put(sock, b'{"id": 123456}')
        deadline = time.monotonic() + _ANSWER_S
        while not any(b"123456" in answer for answer in _take(sock)):
            assert time.monotonic() < deadline, "the rank doesn't answer any more"
            select.select([sock], [], [], 1.0)


def _put(sock: socket.socket, data: bytes) -> int:
    while True:
        try:
            return sock.send(data)
        except BlockingIOError:
            assert select.select([], [sock], [], _ANSWER_S)[1], "the peer takes nothing"


def _take(sock: socket.socket) -> list[bytes]:
    answers = []
    with contextlib.suppress(BlockingIOError):
        while answer := sock.recv(1 << 18):
            answers.append(answer)
    return answers


def attack_coordinator(seed: int, say: Say, *, messages: int) -> None:
    """The port of a real coordinator under attack without its secret; a launcher with it must hear what it asks for.

    Raises:
        AssertionError, TimeoutError: it did harm.
    """
    rng = random.Random(seed)
    hostile = Hostile(rng, examples(_TO_COORDINATOR))
    listener, lines, reactor = tcp.listen("127.0.0.1", 0), list[str](), Reactor()
    address = "{}:{}".format(*listener.getsockname()[:2])
    member: Any = SimpleNamespace()
    leader = LeaderProcess(reactor, member, m.LeaderStart(_JOB, _SECRET), lines.append)

    def reach() -> socket.socket:
        sock = socket.create_connection(tcp.parse_address(address), _ANSWER_S)
        if rng.random() < 0.3:
            with contextlib.suppress(OSError):
                sock.sendall(encode(Challenge("00" * 16)))
        return sock

    with contextlib.closing(reactor), contextlib.closing(leader):
        leader.begin(Seen(address, 0, 0), listener)
        pids = leader.pids()
        with _launcher(reactor, address, "i0") as ask:
            before = memory_kib(*pids)
            counts = storm(reach, hostile, messages, rng, lambda: ask(m.Beat()))
            ask(m.Beat())
            with _launcher(reactor, address, "i1"):
                after = memory_kib(*pids)
            assert after["own_kib"] < before["own_kib"] + 3 * _MORE_KIB, (before, after)
            assert (lines, leader.pids()) == ([], pids), "the coordinator has exited"
    say(f"anybody -> coordinator: {counts}; before: {before}, after: {after}")


@contextlib.contextmanager
def _launcher(reactor: Reactor, address: str, instance: str) -> Iterator[Callable[[Any], None]]:
    """Connect a launcher that knows the secret; what is yielded sends a message and waits for an answer."""
    with sockets(reactor, _SECRET) as (transport, ear):

        def ask(message: Any) -> None:
            count = len(ear.heard_messages)
            transport.transmit(message)
            until(reactor, lambda: len(ear.heard_messages) > count)

        until_s = time.monotonic() + _ANSWER_S
        while ear.told[-1:] != ["opened"]:  # a flood from its own address may displace it: it comes again
            assert time.monotonic() < until_s, "a launcher that knows the secret isn't let in"
            ear.told.clear()
            transport.connect(address)
            until(reactor, lambda: ear.told)
        ask(m.Hello("fuzz", _JOB.rules, instance, f"host of {instance}"))
        yield ask
