"""Copies between keepers: what comes whole, and what doesn't. Real sockets, made-up segments."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megatron_ft.core.errors import ProtocolError
from megatron_ft.core.memory.snapshots import SnapshotKey
from megatron_ft.core.messages.copies import Offer, Want
from megatron_ft.ipc.memory import segment
from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.net.secure_channel import NONCE_BYTES
from megatron_ft.keeper import copies, link
from megatron_ft.keeper.copies import Copying, Door, Lent, ToCopy

KEY, SNAPSHOT, COMPLETE = b"k" * 32, SnapshotKey(1, 7), SnapshotKey(1, 6)
CONTENT = random.Random(1).randbytes(9 << 20)
"""Three pieces, the last one shorter."""


def made(content: bytes = CONTENT) -> int:
    fd = segment.create()
    os.pwrite(fd, content, 0)
    return fd


class Loop:
    """What the keeper's loop would answer."""

    def __init__(self) -> None:
        self.refuses = ""
        self.taken: list[bytes | str] = []
        self.verified = True

    def admit(self, offer: Offer) -> int | str:
        assert (offer.key, offer.world, offer.complete) == (SNAPSHOT, 4, COMPLETE)
        return self.refuses or 1

    def take(self, number: int, fd: int, why: str) -> None:
        assert number == 1
        self.taken.append(why if fd < 0 else os.pread(fd, 1 << 30, 0))
        if fd >= 0:
            os.close(fd)

    def is_verified(self, number: int) -> bool | None:
        return self.verified if self.taken else None

    def lend(self, want: Want) -> Lent | str | None:
        if want.rank:
            return "there is no verified segment of rank 1"
        return Lent(made(), Offer(want.key, want.rank, 4, len(CONTENT)))


class Peer:
    """A door, and where it is."""

    def __init__(self) -> None:
        self.loop = Loop()
        listener = tcp.listen("127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        Door(listener, KEY, self.loop, lambda call: call())

    def send(self, key: bytes = KEY, bytes_per_s: int = 0, address: str = "") -> str:
        copying = Copying(SNAPSHOT, address or self.address, COMPLETE)
        return copies.send(copying, key, [ToCopy(2, made(), len(CONTENT))], 4, bytes_per_s)

    def fetch(self, rank: int = 0, address: str = "") -> tuple[bytes, str]:
        fd, why = copies.fetch(address or self.address, KEY, SNAPSHOT, rank, lambda: True)
        content = os.pread(fd, 1 << 30, 0) if fd >= 0 else b""
        if fd >= 0:
            os.close(fd)
        return content, why


@pytest.fixture
def peer() -> Peer:
    return Peer()


@contextlib.contextmanager
def between(peer: Peer, change_at: int = -1, cut_at: int = -1) -> Iterator[str]:
    """An address whose bytes reach the peer, but for one bit or an end; in both directions counted together."""
    listener, count = socket.create_server(("127.0.0.1", 0)), 0
    lock = threading.Lock()

    def forward(source: socket.socket, target: socket.socket) -> None:
        nonlocal count
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                with lock:
                    first, count = count, count + len(data)
                if first <= change_at < first + len(data):
                    data[change_at - first] ^= 1
                if first <= cut_at < first + len(data):
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            inner = listener.accept()[0]
            host, _, port = peer.address.rpartition(":")
            outer = socket.create_connection((host, int(port)))
            for ends in ((inner, outer), (outer, inner)):
                threading.Thread(target=forward, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_copy_arrives_whole(peer: Peer) -> None:
    assert peer.send() == ""
    assert peer.loop.taken == [CONTENT]


def test_copy_is_fetched_whole(peer: Peer) -> None:
    assert peer.fetch() == (CONTENT, "")


def test_segment_that_the_other_node_has_not_is_refused_with_its_reason(peer: Peer) -> None:
    assert peer.fetch(rank=1) == (b"", "there is no verified segment of rank 1")


def test_copy_that_is_not_wanted_is_refused_with_its_reason(peer: Peer) -> None:
    peer.loop.refuses = "its memory doesn't suffice for copies"
    assert peer.send() == peer.loop.refuses
    assert peer.loop.taken == []


def test_copy_that_is_damaged_there_counts_as_none(peer: Peer) -> None:
    peer.loop.verified = False
    assert peer.send() == "it is damaged, or no longer needed"


def test_keeper_of_another_job_gets_and_gives_nothing(peer: Peer) -> None:
    assert peer.send(key=b"x" * 32) != ""
    assert peer.loop.taken == []


@pytest.mark.parametrize("seed", range(40))
def test_bit_changed_on_the_way_is_found(peer: Peer, seed: int) -> None:
    """Wherever it is: in a nonce, a proof, a message, a seal or a piece."""
    chance = random.Random(seed)
    at = chance.randrange(200) if seed % 2 else chance.randrange(len(CONTENT))
    with between(peer, change_at=at) as address:
        assert peer.send(address=address) != ""
    # a changed acknowledgement comes after a copy that is whole
    assert all(each == CONTENT or isinstance(each, str) for each in peer.loop.taken)
    with between(peer, change_at=at) as address:
        content, why = peer.fetch(address=address)
    assert (content, bool(why)) == (b"", True)


@pytest.mark.parametrize("at", [0, 40, 100, 200, 5_000_000, len(CONTENT) - 1])
def test_connection_that_ends_on_the_way_leaves_no_copy(peer: Peer, at: int) -> None:
    with between(peer, cut_at=at) as address:
        assert peer.send(address=address) != ""
    with between(peer, cut_at=at) as address:
        assert peer.fetch(address=address)[0] == b""
    assert CONTENT not in peer.loop.taken


def test_copy_given_up_by_its_sender_is_not_sent(peer: Peer) -> None:
    copying = Copying(SNAPSHOT, peer.address, COMPLETE, is_wanted=False)
    assert copies.send(copying, KEY, [ToCopy(2, made(), len(CONTENT))], 4, 0) == "no longer needed"
    assert peer.loop.taken == []


def test_bandwidth_bounds_what_is_sent(peer: Peer) -> None:
    began_s = time.monotonic()
    assert peer.send(bytes_per_s=30 << 20) == ""
    assert time.monotonic() - began_s > 0.25


def test_nobody_there_is_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert copies.fetch(f"127.0.0.1:{port}", KEY, SNAPSHOT, 0, lambda: True) == (-1, "Connection refused")


def test_stranger_is_heard_no_further_than_its_proof(peer: Peer) -> None:
    host, _, port = peer.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"n" * NONCE_BYTES + b"p" * 32)
        assert len(stranger.recv(100)) == NONCE_BYTES
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert peer.loop.taken == []


def test_connections_are_bounded(peer: Peer) -> None:
    host, _, port = peer.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        nonces = []
        for each in strangers:
            each.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                nonces.append(each.recv(NONCE_BYTES))
        assert sum(len(each) == NONCE_BYTES for each in nonces) == 32


def test_message_that_is_no_object_is_a_protocol_error() -> None:
    ours, theirs = socket.socketpair()
    ends: list[link.Link] = []
    accepting = threading.Thread(target=lambda: ends.append(link.accept(theirs, KEY)))
    accepting.start()
    one = link._prove(ours, KEY, link.Role.CONNECTS)
    accepting.join()
    for body in (b"[]", b"{", b'{"type":"offer"}', b'{"type":"other"}'):
        one._send(body)
        with pytest.raises(ProtocolError):
            ends[0].receive()
    one.close()
    ends[0].close()
