"""Copies of snapshots on another node: sent, taken, and given back. In threads of the keeper, which may wait.

The keeper's loop owns the segments: threads ask it (`CopyKeeping`), and never touch one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from megatron_ft.core.errors import ProtocolError, SnapshotError
from megatron_ft.memory.base.keeper_messages import Granted, NotKept, Offer, Want
from megatron_ft.memory.keeper import link, work
from megatron_ft.memory.keeper.link import Link
from megatron_ft.memory.rules.snapshots import SnapshotKey

if TYPE_CHECKING:
    from megatron_ft.memory.keeper.copy_keeping import CopyKeeping

_MOST_CONNECTIONS = 32
_VERIFY_S = 120.0
"""Seconds that another node has to verify what it has got."""
_LOOK_S = 0.05

T = TypeVar("T")


class Offered(NamedTuple):
    """Segment that another node gets. ``fd`` is the thread's own."""

    offer: Offer
    fd: int


@dataclass(eq=False, slots=True)
class Copying:
    """Copying of a snapshot that is under way. ``moved_s``: when the last piece was sent."""

    key: SnapshotKey
    address: str
    is_wanted: bool = True
    moved_s: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        self.moved_s = time.monotonic()
        if not self.is_wanted:
            raise SnapshotError("no longer needed")


def send(copying: Copying, key: bytes, segments: Sequence[Offered], bytes_per_s: int) -> str:
    """Send segments to the keeper of another node, which verifies each. Return why that failed, or ""."""
    try:
        peer = link.connect(copying.address, key)
        try:
            for each in segments:
                copying.check()
                peer.send(each.offer)
                peer.expect(Granted)
                peer.send_segment(each.fd, each.offer.nbytes, bytes_per_s, copying.check)
                peer.expect(Granted, _VERIFY_S)
        finally:
            peer.close()
    except link.FAILURES as error:
        return work.why(error)
    finally:
        for each in segments:
            os.close(each.fd)
    return ""


def fetch(address: str, key: bytes, snapshot: SnapshotKey, rank: int, is_wanted: Callable[[], bool]) -> tuple[int, str]:
    """Return the descriptor of a sealed segment that the keeper of another node has; or -1, and why there is none."""
    try:
        peer = link.connect(address, key)
        try:
            peer.send(Want(snapshot, rank))
            answer = peer.expect(Offer, _VERIFY_S)
            if (answer.key, answer.rank) != (snapshot, rank):
                raise ProtocolError("another segment was offered")
            return peer.receive_segment(answer.nbytes, work.room_maker(is_wanted)), ""
        finally:
            peer.close()
    except link.FAILURES as error:
        return -1, work.why(error)


class Door:
    """Serves the keepers of other nodes, each connection in a thread, until the process ends.

    ``ask`` has the keeper's loop make a call, and waits for what it returns.
    """

    def __init__(self, listener: socket.socket, key: bytes, host: CopyKeeping, ask: Callable[..., Any]) -> None:
        self._listener = listener
        self._key = key
        self._host = host
        self._ask = ask
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        listener.setblocking(True)
        threading.Thread(target=self._accept, name="ft_door", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(_LOOK_S)  # no descriptors are left, or the peer has gone
                continue
            if self._connections.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="ft_peer", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            peer = link.accept(sock, self._key)
            try:
                while True:
                    match peer.receive():
                        case Offer() as offer:
                            self._take(peer, offer)
                        case Want() as want:
                            self._give(peer, want)
                        case _:
                            raise ProtocolError("an answer came without a question")
            finally:
                peer.close()
        except (OSError, ProtocolError):
            pass  # it has all it came for; a peer that didn't says so on its own node
        finally:
            self._connections.release()

    def _take(self, peer: Link, offer: Offer) -> None:
        number = self._ask(lambda: self._host.admit(offer))
        if isinstance(number, str):
            peer.send(NotKept(number))
            return
        fd, why = -1, "the connection has ended"
        is_verified = partial(self._ask, lambda: self._host.is_verified(number))
        try:
            peer.send(Granted())
            fd = peer.receive_segment(offer.nbytes, work.room_maker(lambda: is_verified() is None))
        except link.FAILURES as error:
            why = work.why(error)
            raise ConnectionAbortedError(why) from None
        finally:
            self._ask(lambda: self._host.take(number, fd, why))
        peer.send(Granted() if _awaited(is_verified) else NotKept("it is damaged, or no longer needed"))

    def _give(self, peer: Link, want: Want) -> None:
        found = _awaited(partial(self._ask, lambda: self._host.lend(want)))
        if not isinstance(found, Offered):
            peer.send(NotKept(str(found or "it isn't verified yet")))
            return
        try:
            peer.send(found.offer)
            peer.send_segment(found.fd, found.offer.nbytes, 0, lambda: None)
        finally:
            os.close(found.fd)


def _awaited(look: Callable[[], T | None]) -> T | None:
    """Look until there is something, for as long as the verification of a segment may take."""
    until_s = time.monotonic() + _VERIFY_S - link.STALL_S
    while (found := look()) is None and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return found
