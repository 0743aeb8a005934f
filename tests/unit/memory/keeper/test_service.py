"""A keeper's loop, in a thread, between the two ends of a launcher's connection and of ranks'."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from megatron_ft.link.wire import Channel, Received, accept_peer, close_fds, connect
from megatron_ft.memory.base import segment, segment_files
from megatron_ft.memory.base.keeper_messages import (
    KEEPER_TO_LAUNCHER,
    KEEPER_TO_RANK,
    CommitSegment,
    DropSegment,
    Fetch,
    Granted,
    KeeperHello,
    NotKept,
    Prepare,
    Says,
    SealedSegment,
    TakeStock,
)
from megatron_ft.memory.base.segment_files import set_name
from megatron_ft.memory.keeper import copies, link, service
from megatron_ft.memory.rank.restoring import fill_from
from megatron_ft.memory.rules.retention import BeginSegment, Limit
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, KeeperPort, Kept, KeptSnapshot, Saved, SnapshotKey
from tests.support.extras import skip_module_without
from tests.support.launching import wait_until

skip_module_without("xxhash")

from tests.memory.flips import PLACE, filled  # noqa: E402 - needs xxhash
from tests.support.keepers import RealKeeper  # noqa: E402

T = TypeVar("T")
BOUND_S = 20.0
KEY = bytes(32)


class Peer:
    """One end of a connection with the keeper."""

    def __init__(self, channel: Channel, vocabulary: Any) -> None:
        self.channel = channel
        self._vocabulary = vocabulary
        self._received: list[Received] = []

    def hear(self, kind: type[T], bound_s: float = BOUND_S) -> tuple[T, tuple[int, ...]]:
        """The next message, and the descriptors that came with it."""
        if not self._received:
            select.select([self.channel], [], [], bound_s)
            self._received = self.channel.receive()
        message, fds = self._received.pop(0)
        parsed = self._vocabulary.parse(message)
        assert isinstance(parsed, kind), parsed
        return parsed, fds


class Served(RealKeeper):
    """A keeper that isn't prepared. ``hears``: the launcher's end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, prepared=False)
        self.hears = Peer(self.launcher, KEEPER_TO_LAUNCHER)

    def order(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        self.launcher.send(message, fds)

    def rank(self, rank: int = 0, cycle: int = 0, world: int = 1, **more: Any) -> Peer:
        """A rank that is welcome, in a cycle that begins with it, and with all others of the job, on this node."""
        self.order(Prepare(cycle, (*range(world),), world, **more))
        peer = Peer(connect(str(self.path), BOUND_S), KEEPER_TO_RANK)
        peer.channel.send(KeeperHello(cycle, rank))
        peer.hear(Granted)
        return peer


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what the keeper takes for the node's memory: 100 GB, and all of it free, until then."""

    def is_now(left_bytes: int) -> None:
        for module in (service, service.work):
            monkeypatch.setattr(module, "node_memory", lambda: [Limit(left_bytes, 10**11, "available")])

    is_now(10**11)
    return is_now


@pytest.fixture
def served(tmp_path: Path, memory: object) -> Iterator[Served]:
    made = Served(tmp_path / "keeper.sock")
    yield made
    made.close()


def descriptors(inode: int) -> list[int]:
    """This process's descriptors of a file: the keeper's and the launcher's are among them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/self/fd/{name}").st_ino == inode:
                found.append(int(name))
    return found


def sealed(iteration: int, world: int = 1) -> int:
    """A segment of rank 0; it is another one in each iteration."""
    fd = filled({"a": bytes([iteration]) * 100}, key=SnapshotKey(0, 0, iteration), world=world)
    segment.seal(fd, os.fstat(fd).st_size)
    return fd


def written(served: Served, rank: Peer, iteration: int, world: int = 1, *, is_full: bool = False) -> int:
    """The launcher's descriptor of a segment that the rank has written. ``is_full``: an earlier one gives way first."""
    fd = sealed(iteration, world)
    data = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    rank.channel.send(BeginSegment(len(data)))
    if is_full:
        served.order(served.hears.hear(DropSegment)[0])
    _, (fd,) = rank.hear(Granted)
    os.pwrite(fd, data, 0)
    os.close(fd)
    rank.channel.send(CommitSegment(SnapshotKey(0, 0, iteration), len(data)))
    hold, (fd,) = served.hears.hear(SealedSegment)
    assert (hold.rank, hold.key) == (0, SnapshotKey(0, 0, iteration))
    return fd


@pytest.mark.parametrize(
    ("cycle", "rank", "why"),
    [
        (0, 0, "another process is connected as rank 0"),
        (1, 0, "this is cycle 0, not 1"),
        (0, 7, "rank 7 is not of this node"),
    ],
)
def test_hello_of_another_place_is_refused_with_the_reason(
    served: Served, monkeypatch: pytest.MonkeyPatch, cycle: int, rank: int, why: str
) -> None:
    def accept_another(listener: socket.socket) -> Any:
        found = accept_peer(listener)
        return None if found is None else (found[0], found[1] + 1, found[2])

    first = served.rank()
    monkeypatch.setattr(service, "accept_peer", accept_another)
    stranger = Peer(connect(str(served.path), BOUND_S), KEEPER_TO_RANK)
    stranger.channel.send(KeeperHello(cycle, rank))
    assert stranger.hear(NotKept)[0].why == why
    first.channel.close()


def test_segments_that_a_cycle_drops_are_freed_after_the_launchers_in_the_background_and_count_until_then(
    served: Served, monkeypatch: pytest.MonkeyPatch, memory: Callable[[int], None]
) -> None:
    rank, key = served.rank(), SnapshotKey(0, 0, 1)
    launchers = written(served, rank, 1)
    rank.hear(Granted)
    served.hears.hear(Saved)
    rank.channel.send(BeginSegment(4096))  # another one, which the launcher hasn't
    close_fds(rank.hear(Granted)[1])
    rank, inode = served.rank(cycle=1), os.fstat(launchers).st_ino
    assert served.hears.hear(DropSegment)[0] == DropSegment(0, key)
    assert len(descriptors(inode)) == 2
    threads, may_go_on, close = list[str](), threading.Event(), os.close

    def slow_close(fd: int) -> None:
        """Free no memory of the segment for now, as if it were large."""
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == inode and len(descriptors(inode)) == 1:
                threads.append(threading.current_thread().name)
                assert may_go_on.wait(BOUND_S)
        close(fd)

    monkeypatch.setattr(os, "close", slow_close)
    os.close(launchers)
    assert threads == []
    served.order(DropSegment(0, key))
    memory(0)

    def why_not() -> str:
        rank.channel.send(BeginSegment(4096))
        return rank.hear(NotKept)[0].why

    wait_until(lambda: len(threads) == 1 and "blocking_call" in threads[0], BOUND_S)
    wait_until(lambda: re.search(r"of which 0\.000\d+ MB are allocated", why_not()) is not None, BOUND_S)
    assert served.hears.hear(Says)
    may_go_on.set()
    wait_until(lambda: "allocated" not in why_not(), BOUND_S)
    assert not descriptors(inode)


def test_stock_is_told_in_time_though_a_segment_is_still_being_verified(served: Served) -> None:
    rank = served.rank()
    fds = [written(served, rank, 1)]
    rank.hear(Granted)
    served.hears.hear(Saved)
    served.may_verify.clear()
    fds.append(written(served, rank, 2))
    served.order(TakeStock(0.05))
    first = KeptSnapshot(SnapshotKey(0, 0, 1), 1, (0,))
    assert served.hears.hear(Kept)[0] == Kept((first,))
    both = Kept((first, KeptSnapshot(SnapshotKey(0, 0, 2), 1, (0,))))
    served.may_verify.set()
    served.hears.hear(Saved)
    assert served.hears.hear(Kept)[0] == both  # once all is verified
    served.order(TakeStock())
    assert served.hears.hear(Kept)[0] == both
    close_fds(fds)


def test_keeper_without_descriptors_refuses_what_waits_and_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, create = served.rank(), segment.create

    def fail() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(service, "_PAUSE_S", 0.0)
    monkeypatch.setattr(segment, "create", fail)
    for _ in range(2):
        rank.channel.send(BeginSegment(4096))
        assert rank.hear(NotKept)[0].why == "the keeper has too many open files"
    assert "too many open files" in served.hears.hear(Says)[0].text  # once
    monkeypatch.setattr(segment, "create", create)
    close_fds([written(served, rank, 1)])
    rank.hear(Granted)


def test_rank_restores_the_file_of_an_earlier_life(served: Served, tmp_path: Path) -> None:
    earlier, name, fd = SnapshotKey(EARLIER_LIFE, 0, 7), set_name(7, 1, "this life"), sealed(7)
    segment_files.write(str(tmp_path), name, {0: fd}, lambda: None)
    rank = served.rank(cycle=1, restore=earlier, files=f"{tmp_path}/{name}")
    rank.channel.send(Fetch(earlier))
    hold, fds = served.hears.hear(SealedSegment)
    assert (hold.rank, hold.key) == (0, earlier)
    _, segments = rank.hear(Granted)
    state: dict[str | int, Any] = {"a": torch.zeros(100, dtype=torch.uint8)}
    fill_from(os.dup(segments[0]), PLACE, earlier, state)
    assert bytes(state["a"].tolist()) == bytes([7]) * 100
    close_fds([fd, *fds, *segments])


def test_file_that_cannot_be_restored_is_told_to_the_user_and_its_rank(served: Served, tmp_path: Path) -> None:
    earlier = SnapshotKey(EARLIER_LIFE, 0, 7)
    path = f"{tmp_path}/{set_name(7, 1, 'this life')}"
    rank = served.rank(restore=earlier, files=path)
    rank.channel.send(Fetch(earlier))
    said = f"{path}: rank 0 can't be restored: No such file or directory"
    assert served.hears.hear(Says)[0].text == said
    assert "has no verified segment" in rank.hear(NotKept)[0].why


def test_ranks_that_keep_different_iterations_are_named_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MISSED", 3)
    rank = served.rank(world=2)
    for iteration in (1, 2, 3, 4, 5):
        close_fds([written(served, rank, iteration, world=2, is_full=iteration > 3)])
        if iteration == 3:
            why = "the newest of this node are rank 0 3, rank 1 none"
            said = f"none of the last 3 memory checkpoints of rank 0 is one that all ranks have: {why}"
            assert served.hears.hear(Says)[0].text == said
        rank.hear(Granted)


def test_new_keeper_serves_the_copies_that_the_one_before_kept_for_another_node(served: Served) -> None:
    fd = sealed(1, world=2)
    served.order(SealedSegment(0, SnapshotKey(0, 0, 1)), (fd,))
    with socket.create_server(("", 0)) as before:
        port = before.getsockname()[1]
    served.order(Prepare(0, (1,), 2, copies_key=KEY.hex(), port=port))
    assert served.hears.hear(KeeperPort)[0].port == port
    with contextlib.closing(link.connect(f"127.0.0.1:{port}", KEY)) as peer:
        fetched = copies.take(peer, Fetch(SnapshotKey(0, 0, 1), 0), lambda: True)
    assert os.pread(fetched, 1 << 20, 0) == os.pread(fd, 1 << 20, 0)
    served.order(TakeStock())
    assert served.hears.hear(Kept)[0].port == port
    close_fds([fd, fetched])
