"""A keeper's door that takes copies, and a connection to it on the way of which a bit changes, or everything ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron_ft.link import tcp
from megatron_ft.memory.base import segment
from megatron_ft.memory.base.keeper_messages import Fetch, Offer
from megatron_ft.memory.keeper import copies, link
from megatron_ft.memory.keeper.copies import CopyKeeping
from megatron_ft.memory.keeper.link import FAILURES
from megatron_ft.memory.keeper.segments import HeldSegment, SegmentState
from megatron_ft.memory.keeper.work import why
from megatron_ft.memory.rules.snapshots import SnapshotKey

SECRET, SNAPSHOT = b"k" * 32, SnapshotKey(1, 0, 7)
OFFER = Offer(SNAPSHOT, (2,), 4, SnapshotKey(1, 0, 6))


def made(content: bytes) -> int:
    fd = segment.create()
    os.pwrite(fd, content, 0)
    return fd


@dataclass
class Copy:
    """What one copy should be, and what has come, or why nothing has; None: it is on its way."""

    content: bytes
    held: HeldSegment
    come: bytes | str | None = None

    @property
    def is_changed(self) -> bool:
        return isinstance(self.come, bytes) and self.come != self.content


class Loop(CopyKeeping):
    """What the keeper's loop would answer. ``content``: of the next copy; ``number``: of segments in an offer."""

    number = 1

    def __init__(self, content: bytes) -> None:
        loop: Any = SimpleNamespace(call_in_loop=lambda call: call())
        self._segments: Any = SimpleNamespace(received=self._received)
        super().__init__(self._segments, loop, lambda *_: None)
        self.content = content
        self.copies: list[Copy] = []
        self.verified = True

    @property
    def taken(self) -> list[bytes | str]:
        return [each.come for each in self.copies if each.come is not None]

    def admit(self, offer: Offer) -> list[HeldSegment] | str:
        if offer != OFFER:
            return f"this isn't what was to come: {offer}"
        admitted = [HeldSegment(2, -1, 0, SegmentState.RECEIVING) for _ in range(self.number)]
        self.copies += [Copy(self.content, held) for held in admitted]
        return admitted

    def _received(self, held: HeldSegment, fd: int) -> None:
        copy = next(each for each in self.copies if each.held is held)
        copy.come = "nothing" if fd < 0 else os.pread(fd, 1 << 30, 0)
        held.state = SegmentState.VERIFIED if fd >= 0 and self.verified else SegmentState.LEAVING
        if fd >= 0:
            os.close(fd)

    def lend(self, want: Fetch) -> int | str | None:
        return made(self.content) if want.rank in (0, 2) else f"there is no verified segment of rank {want.rank}"


class Peer:
    """A door, and where it is."""

    def __init__(self, content: bytes) -> None:
        self.loop = Loop(content)
        listener = tcp.listen("127.0.0.1", 0)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=self.loop.serve, args=(listener, SECRET), daemon=True).start()

    def send(
        self,
        key: bytes = SECRET,
        bytes_per_s: int = 0,
        address: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> str:
        return copies.send(address or self.address, OFFER, key, self.loop.lend, bytes_per_s, check)

    def fetch(self, rank: int = 0, address: str = "") -> tuple[bytes, str]:
        try:
            with contextlib.closing(link.connect(address or self.address, SECRET)) as peer:
                fd = copies.take(peer, Fetch(SNAPSHOT, rank), lambda: True)
        except FAILURES as error:
            return b"", why(error)
        content = os.pread(fd, 1 << 30, 0)
        os.close(fd)
        return content, ""


@dataclass
class Way:
    """Where a connection goes through; ``passed``: bytes so far, in both directions counted together."""

    address: str
    passed: int = 0


@contextlib.contextmanager
def between(peer: Peer, change_at: int = -1, cut_at: int = -1, bit: int = 0) -> Iterator[Way]:
    """An address whose bytes reach the peer, but for one bit or an end."""
    listener = socket.create_server(("127.0.0.1", 0))
    way, lock = Way(f"127.0.0.1:{listener.getsockname()[1]}"), threading.Lock()

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                with lock:
                    first, way.passed = way.passed, way.passed + len(data)
                if first <= change_at < first + len(data):
                    data[change_at - first] ^= 1 << bit
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
            forwarding = [
                threading.Thread(target=forward, args=ends, daemon=True) for ends in ((inner, outer), (outer, inner))
            ]
            for each in forwarding:
                each.start()
            for each in forwarding:
                each.join()
            inner.close()
            outer.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield way
    finally:
        listener.close()
