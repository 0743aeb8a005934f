"""Framing, descriptors, refusals."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.wording import shown
from megatron_ft.link.wire import MAX_FDS, Channel, ChannelClosedError, Decoder, connect, decode, encode, listen


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    a, b = socket.socketpair()
    ends = Channel(a), Channel(b)
    yield ends
    for end in ends:
        end.close()


def raw(end: Channel) -> socket.socket:
    """The socket of an end, for what a channel doesn't send."""
    return socket.socket(fileno=os.dup(end.fileno()))


def test_messages_come_whole_whatever_the_pieces() -> None:
    messages = [{"type": "a", "n": n, "text": "x" * n} for n in range(0, 300, 37)]
    stream = b"".join(encode(m) for m in messages)
    rng = random.Random(5)
    decoder, got, at = Decoder(), [], 0
    while at < len(stream):
        size = rng.randrange(1, 50)
        got += map(decode, decoder.bodies(stream[at : at + size]))
        at += size
    assert [{k: json.loads(m.body)[k] for k in ("type", "n", "text")} for m in got] == messages


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\2{}",
        b'\0\0\0\x0d{"type": "a"}',
        b"\0\0\0\3\xff\xfe\xfd",
        encode({"type": "a"}).replace(b'"fds":0', b'"fds":9'),
        encode({"type": "a"}).replace(b'"a"', b"123"),
        b"\0\0\x9c\x40" + b"[" * 40000,
    ],
)
def test_bytes_that_are_not_ours_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(map(decode, Decoder().bodies(data)))


def test_message_sent_before_the_end_is_received_before_the_channel_closes(pair: tuple[Channel, Channel]) -> None:
    left, right = pair
    left.send({"type": "last"})
    left.close()
    assert [r.message.name for r in right.receive()] == ["last"]
    with pytest.raises(ChannelClosedError):
        right.receive()


def test_a_peer_that_takes_nothing_is_given_up_within_the_bound(pair: tuple[Channel, Channel]) -> None:
    left, _right = pair
    with pytest.raises(ChannelClosedError, match="takes no messages"):
        for _ in range(1000):
            left.send({"type": "a", "text": "x" * 100_000}, timeout_s=0.05)


def test_listen_replaces_a_dead_socket_but_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listen(path).close()
    again = listen(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    connect(path, 5.0).close()
    again.close()
    with pytest.raises(ConnectionRefusedError):
        connect(path, 5.0)
    plain = tmp_path / "file"
    plain.write_text("keep me")
    with pytest.raises(OSError):  # noqa: PT011
        listen(str(plain))
    assert plain.read_text() == "keep me"


def test_peers_of_another_user_are_refused(pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ft.link import wire

    uid = os.geteuid()
    peer = raw(pair[0])
    assert wire.check_peer(peer) == os.getpid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    if uid == 0:
        assert wire.check_peer(peer) == os.getpid()  # root may talk to anybody's monitor
    else:
        with pytest.raises(ProtocolError):
            wire.check_peer(peer)


def test_descriptors_that_no_message_announces_end_the_connection(pair: tuple[Channel, Channel]) -> None:
    """Else a peer could fill our table of descriptors."""
    ours, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match="no message announced"):
        for _ in range(MAX_FDS + 1):
            with raw(theirs) as rogue:
                socket.send_fds(rogue, [encode({"type": "hello"})], [0])
            ours.receive()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_peer_that_never_pauses_gets_no_more_than_its_turn(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    sent = 0
    with contextlib.suppress(ChannelClosedError):
        for sent in range(100_000):  # noqa: B007 - how many there was room for
            theirs.send({"type": "status", "padding": "x" * 1000}, timeout_s=0.0)
    first = ours.receive(everything=False)
    assert 0 < len(first) < sent
    assert len(first) + len(ours.receive()) >= sent


def test_channel_that_takes_no_descriptors_is_given_none() -> None:
    a, b = socket.socketpair()
    ours = Channel(a, takes_fds=False)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        socket.send_fds(b, [encode({"type": "hello"})], [0] * MAX_FDS)
        assert [each.fds for each in ours.receive()] == [()]
    assert len(os.listdir("/proc/self/fd")) == before
    socket.send_fds(b, [encode({"type": "hello"}, 1)], [0])
    with pytest.raises(ProtocolError, match="announces 1 descriptors, 0 came"):
        ours.receive()
    b.close()


def test_two_answers_to_one_question_are_no_answer(pair: tuple[Channel, Channel]) -> None:
    ours, theirs = pair
    raw(theirs).sendall(encode({"type": "a"}) * 2)
    with pytest.raises(ProtocolError, match="2 messages came"):
        ours.wait_message(5.0)
    assert ours.fileno() == -1


def test_a_peer_that_sends_byte_after_byte_is_no_answer(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    sends = raw(theirs)
    sends.sendall(b"\0\x0f\0\0")

    def one_more(*_: object) -> bool:
        sends.sendall(b" ")
        return True

    monkeypatch.setattr("megatron_ft.link.wire.wait_ready", one_more)
    # 983040 bytes are announced: who only waits for a pause gets them all, and finds that they are no message
    with pytest.raises(TimeoutError):
        ours.wait_message(0.05)


def test_value_from_a_peer_is_shown_short_and_plain() -> None:
    assert shown("\x1b[2J\n\ud800é") == "'\\x1b[2J\\n\\ud800\\xe9'"
    assert shown([[[]]]) == "a list"
    assert shown(None) == "None"
    assert len(shown("x" * 10**6)) < 120
    assert len(shown(10**4000)) < 120


def test_a_client_of_nvidia_resiliency_ext_is_told_what_to_do() -> None:
    with pytest.raises(ProtocolError, match=r"it sends pickles, .*--ft-reference-names on"):
        decode(pickle.dumps({"type": "hello"}))
