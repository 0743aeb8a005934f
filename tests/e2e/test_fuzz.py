"""Hostile input to sockets and boards, for seconds; `make fuzz` does it at full size."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ft.link.wire import encode
from tests.fuzz.boards import fuzz_boards
from tests.fuzz.sockets import attack_launcher, attack_monitor, exchange
from tests.fuzz.watched import CYCLE, figures, watched
from tests.support.launching import open_files, wait_until

SEED = int(os.environ.get("FT_TEST_SEED", "2026"))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the parts tell; pytest shows it, and the seed, where a test fails."""
    print(f"FT_TEST_SEED={SEED}")
    return []


def test_a_monitor_under_attack_watches_its_rank(tmp_path: Path, said: list[str]) -> None:
    attack_monitor(tmp_path, SEED, said.append, hellos=1000, questions=500, timeout_s=3.0)


def test_a_launcher_under_attack_goes_on(tmp_path: Path, said: list[str]) -> None:
    attack_launcher(tmp_path, SEED, said.append, requests=1000)


def test_board_reader_survives_garbage(said: list[str]) -> None:
    fuzz_boards(SEED, 300, said.append)


def test_strangers_neither_take_the_place_of_the_launchers_rank_nor_keep_the_monitor_from_it(tmp_path: Path) -> None:
    """Their descriptors aren't kept; one's messages are valid as far as the wire goes, and there is always one more."""
    flood = """
import socket, sys
from megatron_ft.link.wire import encode
data = encode({"type": "x"}) * 2000
while True:
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(sys.argv[1])
            while True:
                sock.sendall(data)
    except OSError:
        pass
"""
    with watched(tmp_path, timeout_s=2.0) as both:
        for cycle in (CYCLE, CYCLE + 1, 2**62):
            answer = exchange(both.path, {"type": "rank_hello", "cycle": cycle, "rank": 0, "warmup_iterations": 0})
            assert b'"rank_refused"' in answer, answer
        before, sent = figures(both.monitor.pid, both.log_dir)["fds"], tmp_path / "sent"
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as sock, sent.open("w") as file:
                sock.connect(both.path)
                hello = {"type": "rank_hello", "cycle": 0, "rank": 0, "warmup_iterations": 0}
                socket.send_fds(sock, [encode(hello, 3)], 3 * [file.fileno()])
                sock.recv(1000)
        wait_until(lambda: str(sent) not in open_files(both.monitor.pid))
        # nor the 20 connections; it may open its event log and the like meanwhile
        wait_until(lambda: figures(both.monitor.pid, both.log_dir)["fds"] < before + 10)
        flooder = subprocess.Popen([sys.executable, "-c", flood, both.path])
        try:
            time.sleep(0.3)
            both.hang()
        finally:
            flooder.send_signal(signal.SIGKILL)
            flooder.wait()
