"""Each of our sockets under attack, with a healthy rank behind it that must neither die nor be left alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.config.kinds import DEFAULT_LOG_MAX_BYTES
from megatron_ft.link.wire import Channel
from tests.fuzz.hostile import HELLOS, ORDERS, REQUESTS, Hostile, is_harmless
from tests.fuzz.storm import ANSWER_S, exchange, storm
from tests.fuzz.watched import figures, watched
from tests.support.launching import Launched

__all__ = ["attack_launcher", "attack_monitor"]

Say = Callable[[str], None]
_MORE_KIB = 12_000
"""What a process may have grown by: its first warnings, its evidence, Python's free lists."""
_MOST_LINES = 60
_KINDS_OF_LINES = 6
_MOST_QUESTION = 300
_PARTS = 4
_READ_EVERY = 50
_CALLERS = 2 * 16
"""Descriptors of connections that a monitor keeps open at most."""


def attack_monitor(
    directory: Path, seed: int, say: Say, *, hellos: int, orders: int, questions: int, timeout_s: float = 5.0
) -> None:
    """The socket of the monitor, its channel to the launcher, and the socket on which it asks the rank.

    Raises:
        AssertionError, TimeoutError: it did harm.
    """
    rng, began = random.Random(seed), time.monotonic()
    with watched(directory, timeout_s=timeout_s) as both:
        before = figures(both.monitor.pid, both.log_dir)
        say(f"rank -> monitor: {storm(both.path, Hostile(rng, HELLOS), hellos, rng, both.check)}")
        _send_orders(both.channel, Hostile(rng, ORDERS, _is_bearable), orders, both.check)
        say(f"launcher -> monitor: {orders} orders")
        _ask(both.fds[4], Hostile(rng, ({"id": 1}, {"id": "x"})), questions)
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


def attack_launcher(directory: Path, seed: int, say: Say, *, requests: int, hellos: int) -> None:
    """The launcher's control socket, and the socket of the monitor that it has started.

    Raises:
        AssertionError, TimeoutError: it did harm.
    """
    rng = random.Random(seed)
    script, flag = directory / "train.py", directory / "hang"
    script.write_text(_SCRIPT)
    config = ["--ft-rank_section_timeouts=step:5", "--ft-rank_out_of_section_timeout=none"]
    arguments = ["--nproc-per-node=1", "--max-restarts=0", *config, str(script), str(flag)]
    launched = Launched(directory, arguments, {})
    try:
        (paths,) = launched.wait_for(r"^sockets (.*)$")
        control, monitor = paths.split()
        (monitor_pid,) = launched.monitor_pids().values()
        pids = {"launcher": launched.process.pid, "monitor": monitor_pid}
        before = {name: figures(pid, launched.log_dir) for name, pid in pids.items()}

        def look() -> None:
            assert launched.process.poll() is None, launched.err[-3000:]
            # the rank's end would be the job's, and another monitor has another number
            assert os.path.exists(f"/proc/{monitor_pid}"), launched.err[-3000:]

        for part in range(1, _PARTS + 1):
            counts = storm(control, Hostile(rng, REQUESTS, is_harmless), requests // _PARTS, rng, look)
            say(f"rank -> launcher, part {part}: {counts}; {figures(pids['launcher'], launched.log_dir)}")
        say(f"rank -> its launcher's monitor: {storm(monitor, Hostile(rng, HELLOS), hellos, rng, look)}")
        exchange(control, {"type": "resume"})
        answer = json.loads(exchange(control, {"type": "status"}))
        (rank,) = answer["ranks"]
        # a field at its default isn't sent
        assert (answer["phase"], answer.get("cycle", 0), rank.get("exit_code"), rank.get("hung", False)) == (
            "running",
            0,
            None,
            False,
        )
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
print("sockets", os.environ["FT_LAUNCHER_IPC_SOCKET"], os.environ["FT_RANK_MONITOR_IPC_SOCKET"], flush=True)
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


def _is_bearable(message: dict[str, Any]) -> bool:
    """A monitor to which its launcher writes what can't be read at all is replaced: that is another test."""
    text = json.dumps(message, ensure_ascii=False)
    is_readable = "[" * 100 not in text and not any("\ud800" <= each <= "\udfff" for each in text)
    return message.get("type") != "stop" and is_readable


def _send_orders(channel: Channel, hostile: Hostile, count: int, look: Callable[[], None]) -> None:
    sock = socket.socket(fileno=os.dup(channel.fileno()))
    try:
        for number in range(count):
            _send_all(sock, hostile.framed())
            if number % _READ_EVERY == 0:
                look()  # a launcher that takes nothing for a second is none
    finally:
        sock.close()
    look()
    channel.send({"type": "resume"}, timeout_s=ANSWER_S)


def _send_all(sock: socket.socket, data: bytes) -> None:
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            assert select.select([], [sock], [], ANSWER_S)[1], "the monitor takes nothing"


def _ask(fd: int, hostile: Hostile, count: int) -> None:
    """Questions that are none, and then one that is."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        sock.setblocking(False)
        for number in range(count):
            _put(sock, b"" if number % 50 == 0 else hostile.body()[:_MOST_QUESTION])
            _take(sock)
        _put(sock, b'{"id": 123456}')
        deadline = time.monotonic() + ANSWER_S
        while not any(b"123456" in answer for answer in _take(sock)):
            assert time.monotonic() < deadline, "the rank doesn't answer any more"
            select.select([sock], [], [], 1.0)


def _put(sock: socket.socket, question: bytes) -> None:
    while True:
        try:
            sock.send(question)
        except BlockingIOError:
            assert select.select([], [sock], [], ANSWER_S)[1], "the rank takes no questions"
        else:
            return


def _take(sock: socket.socket) -> list[bytes]:
    answers = []
    with contextlib.suppress(BlockingIOError):
        while answer := sock.recv(1 << 18):
            answers.append(answer)
    return answers
