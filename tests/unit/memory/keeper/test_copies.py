"""Copies between keepers: what comes whole, and what doesn't. Real sockets, made-up segments."""

from __future__ import annotations

import contextlib
import random
import socket
import time

import pytest

from megatron_ft.errors import SnapshotError
from megatron_ft.link.secure_channel import Challenge, Proof
from megatron_ft.link.wire import Decoder, decode, encode
from tests.memory.in_flight import Peer, between
from tests.support.launching import wait_until

CONTENT = random.Random(1).randbytes(9 << 20)
"""Three pieces, the last one shorter."""


@pytest.fixture
def peer() -> Peer:
    return Peer(CONTENT)


def test_copy_is_fetched_whole_or_refused_with_the_reason(peer: Peer) -> None:
    assert peer.fetch() == (CONTENT, "")
    assert peer.fetch(rank=1) == (b"", "there is no verified segment of rank 1")


def test_copy_that_is_damaged_there_counts_as_none(peer: Peer) -> None:
    peer.loop.verified = False
    assert peer.send() == "it is damaged, or no longer needed"


def test_keeper_of_another_job_gets_and_gives_nothing(peer: Peer) -> None:
    assert peer.send(key=b"x" * 32) != ""
    assert peer.loop.taken == []


@pytest.mark.parametrize("at", [0, 40, 100, 200, 5_000_000, len(CONTENT) - 1])
def test_connection_that_ends_on_the_way_leaves_none_of_several_copies(peer: Peer, at: int) -> None:
    peer.loop.number = 3
    with between(peer, cut_at=at) as way:
        assert peer.send(address=way.address) != ""
    wait_until(lambda: len(peer.loop.taken) == len(peer.loop.copies), 10)
    assert {type(each) for each in peer.loop.taken} <= {str}
    with between(peer, cut_at=at) as way:
        assert peer.fetch(address=way.address)[0] == b""


def test_bandwidth_bounds_what_is_sent(peer: Peer) -> None:
    began_s = time.monotonic()
    assert peer.send(bytes_per_s=30 << 20) == ""
    assert time.monotonic() - began_s > 0.25


def test_stranger_is_heard_no_further_than_its_proof(peer: Peer) -> None:
    host, _, port = peer.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(encode(Challenge("0" * 32)) + encode(Proof("0" * 64)))
        data = b"".join(iter(lambda: stranger.recv(4096), b""))
        assert [decode(body).name for body in Decoder().bodies(data)] == ["challenge", "proof"]
    assert peer.loop.taken == []


def test_connections_are_bounded(peer: Peer) -> None:
    host, _, port = peer.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        answers = []
        for each in strangers:
            each.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                answers.append(each.recv(100))
        assert sum(map(bool, answers)) == 32


def test_copy_given_up_by_its_sender_is_not_sent(peer: Peer) -> None:
    def check() -> None:
        raise SnapshotError("no longer needed")

    assert peer.send(check=check) == "no longer needed"
    assert peer.loop.taken == []
