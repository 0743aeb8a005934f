"""The thread that answers a monitor: whatever it is asked, it goes on."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from megatron_ft.core.messages.crash_reporter import Answer
from megatron_ft.rank.crash_reporter import reporter


@pytest.fixture
def monitor() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    thread = threading.Thread(target=reporter.megatron_ft_crash_reporter, args=(theirs,))
    thread.start()
    yield ours
    ours.close()
    thread.join(30)
    assert not thread.is_alive()


def asked(monitor: socket.socket, question: bytes) -> Answer:
    monitor.send(question)
    return Answer.parse(json.loads(monitor.recv(1 << 20)))


def test_a_question_is_answered_by_its_number(monitor: socket.socket) -> None:
    answer = asked(monitor, b'{"id": 7}')
    assert answer.id == 7
    assert answer.stack
    assert answer.places == ()
    assert asked(monitor, b'{"id": 8, "samples": 2}').places


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"no JSON", b"[]", b"{}", b"7", b'{"id": "x"}', b'{"id": 1, "samples": -3}', b'{"id": 1, "samples": "x"}'],
)
def test_nonsense_gets_no_answer_and_does_no_harm(monitor: socket.socket, nonsense: bytes) -> None:
    monitor.send(nonsense)
    assert asked(monitor, b'{"id": 9}').id == 9


def test_an_answer_that_is_too_long_says_so(monitor: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_MAX_ANSWER_BYTES", 10)
    monitor.send(b'{"id": 9}')
    answer = json.loads(monitor.recv(1 << 20))
    assert answer.keys() == {"id", "error"}
    assert answer["error"].endswith("bytes are too many")
