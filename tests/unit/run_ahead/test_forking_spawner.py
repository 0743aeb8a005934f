"""What a fork server says is checked: its process runs a user's code, and may say anything."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.link import process_tree
from megatron_ft.link.messages.fork_server_messages import RUN_AHEAD_VARIABLE, Failed, Orders
from megatron_ft.link.reactor import Reactor
from megatron_ft.link.wire import PROTOCOL_VERSION
from megatron_ft.records.event_log import NullEventLog
from megatron_ft.run_ahead.forking_spawner import ForkingSpawner, ServerProcess
from tests.support.coordination import BOUND_S, until

STAND_IN = f"""
import json, os, socket, sys
sock = socket.socket(fileno=json.loads(os.environ["{RUN_AHEAD_VARIABLE}"])["fd"])
def say(messages):
    messages = json.loads(messages)
    bodies = [json.dumps({{"v": {PROTOCOL_VERSION}, "fds": 0, **message}}).encode() for message in messages]
    at_once = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    socket.send_fds(sock, [at_once], [0] * sum(message.get("fds", 0) for message in messages))
say(sys.argv[1])
while sock.recv(65536):
    say(sys.argv[2])
"""
READY = {"type": "imports_ready", "where": "train.py:7", "took_s": 0.1}


def started(tmp_path: Path, *, says: list[Any], answers: list[Any]) -> ServerProcess:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    command = [sys.executable, "-I", str(script), json.dumps(says), json.dumps(answers)]
    return ServerProcess(Orders(command, dict(os.environ)))


@contextlib.contextmanager
def ready(tmp_path: Path, *answers: Any) -> Iterator[ServerProcess]:
    server = started(tmp_path, says=[READY], answers=list(answers))
    try:
        while not server.is_ready:
            assert select.select([server.channel_fd], [], [], BOUND_S)[0]
            server.read()
        yield server
    finally:
        server.end(lambda: ())


@pytest.mark.parametrize(
    "message",
    [
        {"type": "import_acts", "statement": "import x", "where": "", "what": ""},
        {"type": "no such"},
    ],
)
def test_a_server_that_says_anything_else_is_replaced(
    reactor: Reactor, tmp_path: Path, message: dict[str, Any]
) -> None:
    said: list[str] = []
    first = started(tmp_path, says=[message], answers=[])
    spawner = ForkingSpawner(
        server=first,
        preload=(),
        reactor=reactor,
        log=NullEventLog(),
        say=said.append,
        announce=said.append,
        check_stop=lambda: None,
        known_children=lambda: (),
        environment=lambda: dict(os.environ),
    )
    spawner.prepare(first.orders.command, None)
    try:
        until(reactor, lambda: said)
        ways = ("SIGKILL", "code 0")  # it may notice that its channel is closed before it is killed
        assert said[0] in [
            f"the fork server exited ({way}); ranks are not affected; starting a new one" for way in ways
        ]
        assert len(said) == 1
        assert first.is_gone
        assert spawner.pids().isdisjoint({first.pid})
        assert spawner.pids()
    finally:
        spawner.close()


@pytest.mark.parametrize(
    "answers",
    [
        [{"type": "failed", "reason": "no more processes"}],
        [{"type": "files_changed", "path": "x"}] * 2,
        [{"type": "files_changed", "path": "x", "fds": 1}],
    ],
)
def test_a_server_that_answers_anything_else_is_killed(tmp_path: Path, answers: list[Any]) -> None:
    with ready(tmp_path, *answers) as server:
        assert isinstance(server.fork_ranks([({"RANK": "0"}, (0, 1, 2))]), Failed)
        assert select.select([server.pidfd], [], [], BOUND_S)[0]
        assert process_tree.exit_code_unreaped(server.pid) in (-signal.SIGKILL, 0)


@pytest.mark.parametrize("pid", [1 << 22, 1])
def test_a_rank_is_a_child_of_the_launcher(tmp_path: Path, pid: int) -> None:
    with ready(tmp_path, {"type": "forked", "pids": [pid]}) as server:
        answer = server.fork_ranks([({"RANK": "0"}, (0, 1, 2))])
        assert answer == Failed(f"process {pid}, its rank, is no child of the launcher")
        assert select.select([server.pidfd], [], [], BOUND_S)[0]
