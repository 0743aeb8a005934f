"""The thread that answers a monitor: whatever it is asked, it goes on; what it sees of the main thread."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.diagnosis.collectives import Collective, Collectives
from megatron_ft.diagnosis.exceptions import lost_threads
from megatron_ft.link.base.codec import decode
from megatron_ft.link.linux.kept_descriptor import KeptDescriptor
from megatron_ft.link.messages.rank_messages import Answer
from megatron_ft.rank.crash_reporter import reporter
from megatron_ft.rank.crash_reporter.reporter import (
    _Hook,
    _note_thread,
    handled_exception,
    megatron_ft_crash_reporter,
)


@pytest.fixture
def monitor() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    thread = threading.Thread(target=megatron_ft_crash_reporter, args=(theirs,))
    thread.start()
    yield ours
    ours.close()
    thread.join(30)
    assert not thread.is_alive()


def asked(monitor: socket.socket, question: bytes) -> Answer:
    monitor.send(question)
    return decode(Answer, monitor.recv(1 << 20))


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"no JSON", b"[]", b"{}", b"7", b'{"id": "x"}', b'{"id": 1, "samples": -3}', b'{"id": 1, "samples": "x"}'],
)
def test_nonsense_gets_no_answer_and_does_no_harm(monitor: socket.socket, nonsense: bytes) -> None:
    monitor.send(nonsense)
    assert asked(monitor, b'{"id": 9}').id == 9


def seen_in_a_finally(error: BaseException) -> list[str]:
    """What another thread sees while this one, the main thread, is in the ``finally`` after the exception."""
    found: list[str] = []

    def step() -> None:
        try:
            raise error
        finally:
            thread = threading.Thread(target=lambda: found.append(handled_exception()))
            thread.start()
            thread.join(10)

    with pytest.raises(type(error)):
        step()
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 doesn't tell")
def test_exception_that_waits_in_a_finally_is_told_with_its_place() -> None:
    (told,) = seen_in_a_finally(ValueError("sample 17\nis broken"))
    assert re.fullmatch(r"ValueError: sample 17 is broken, in test_reporter\.py:\d+ step", told)
    assert seen_in_a_finally(StopIteration()) == [""], "no failure"
    assert handled_exception() == ""


def test_thread_that_died_of_an_exception_is_told_with_its_place(tmp_path: Path) -> None:
    seen: list[threading.ExceptHookArgs] = []

    def load() -> None:
        raise KeyError("shard-0042")

    with (tmp_path / "memory").open("w+b") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", seen.append)
        note = _Hook(threading, KeptDescriptor(os.dup(file.fileno())), _note_thread)
        for _ in range(2):
            thread = threading.Thread(target=load, name="loader")
            thread.start()
            thread.join(10)
            note.retire()
        told = lost_threads((tmp_path / "memory").read_text())
    assert len(seen) == 2, "the program's own hook is called as well, and alone after the end"
    (line,) = told
    assert re.fullmatch(r"thread loader, which died of KeyError: 'shard-0042', in test_reporter\.py:\d+ load", line)


def test_answer_with_large_groups_keeps_the_earliest_collective_of_each_and_the_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = tuple(3 * rank + rank % 2 for rank in range(4000))
    found = [Collective(group=str(at % 2), seq=at, op="all_reduce", ranks=ranks) for at in range(20)]
    stack = (reporter.Frame("train.py", 1, "step"),)
    reply = reporter._reply(Answer(id=1, collectives=Collectives(in_flight=tuple(found)), stack=stack))
    answer = decode(Answer, reply)
    assert len(reply) <= reporter._MAX_ANSWER_BYTES
    assert [each.seq for each in answer.collectives.in_flight] == [0, 1]
    assert answer.stack == stack
    monkeypatch.setattr(reporter, "_MAX_ANSWER_BYTES", 10)
    answer = decode(Answer, reporter._reply(Answer(id=9, collectives=Collectives(in_flight=tuple(found)), stack=stack)))
    assert answer.collectives.error.endswith("bytes are too many")
    assert answer == Answer(id=9, collectives=Collectives(error=answer.collectives.error))
