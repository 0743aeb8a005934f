"""Copies of snapshots on another node: offered, fetched, and given back.

Segments go one way only: who needs one asks for it (`Fetch`). A keeper with a new snapshot offers it, and is asked on
the same connection. The keeper's loop owns the segments and decides which copies are made and kept; `send`, `fetch` and
`CopyKeeping.serve` run in threads, which may wait: they ask the loop, and change no segment of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_ft.errors import ProtocolError, SnapshotError
from megatron_ft.link import tcp
from megatron_ft.link.reactor import Reactor
from megatron_ft.memory.base.keeper_messages import Fetch, Granted, NotKept, Offer, Prepare
from megatron_ft.memory.keeper import link, work
from megatron_ft.memory.keeper.link import Link
from megatron_ft.memory.keeper.segments import Cycle, HeldSegment, Segments, SegmentState
from megatron_ft.memory.rules.snapshots import SnapshotKey

_MOST_CONNECTIONS = 32
_BACKLOG = 64
_VERIFY_S = 120.0
"""Seconds that another node has to verify what it has got."""
_LOOK_S = 0.05
Lend = Callable[[Fetch], int | str | None]
"""Returns a descriptor for the caller, or why there is none; None: it isn't verified yet."""


def send(address: str, offer: Offer, key: bytes, lend: Lend, bytes_per_s: int, check: Callable[[], None]) -> str:
    """Offer a snapshot to the keeper of another node, which fetches and verifies it. Return why that failed, or "".

    ``check`` raises SnapshotError once the copy isn't wanted any more.
    """
    try:
        with contextlib.closing(link.connect(address, key)) as peer:
            check()
            peer.send(offer)
            while isinstance(message := peer.receive(_VERIFY_S), Fetch):
                _give(peer, message, lend, bytes_per_s, check)
            return message.why if isinstance(message, NotKept) else ""
    except link.FAILURES as error:
        return work.why(error)


def take(peer: Link, want: Fetch, is_wanted: Callable[[], bool]) -> int:
    """Return the descriptor of a sealed segment that the other keeper has. Raises one of `FAILURES`."""
    peer.send(want)
    answer = peer.receive(_VERIFY_S)
    if not isinstance(answer, Granted):
        raise SnapshotError(answer.why if isinstance(answer, NotKept) else "the answer is of another kind")
    return peer.receive_segment(answer.nbytes, work.room_maker(is_wanted))


def _give(
    peer: Link, want: Fetch, lend: Lend, bytes_per_s: int = 0, on_piece: Callable[[], None] = lambda: None
) -> None:
    found: int | str | None = _awaited(lambda: lend(want))
    if not isinstance(found, int):
        peer.send(NotKept("it isn't verified yet" if found is None else found))
        return
    try:
        nbytes = os.fstat(found).st_size
        peer.send(Granted(nbytes=nbytes))
        peer.send_segment(found, nbytes, bytes_per_s, on_piece)
    finally:
        os.close(found)


def _awaited(look: Callable[[], Any]) -> Any:
    """Look until there is something, for as long as the verification of a segment may take."""
    until_s = time.monotonic() + _VERIFY_S - link.STALL_S
    while (found := look()) is None and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return found


def _are_verified(segments: Sequence[HeldSegment]) -> bool | None:
    """Return whether all are; None if that isn't known yet."""
    states = {each.state for each in segments}
    return False if SegmentState.LEAVING in states else True if states == {SegmentState.VERIFIED} else None


class CopyKeeping:
    """One keeper's. ``say`` prints a line once per subject and cycle."""

    def __init__(self, segments: Segments, reactor: Reactor, say: Callable[[str, str], None]) -> None:
        self._segments = segments
        self._reactor = reactor
        self._say = say
        self._cycle = Cycle(Prepare(-1, (), 1))
        self._ask = reactor.call_in_loop
        self.key = b""
        """By which keepers of the job know each other; empty: no copies are kept."""
        self.port: int | None = None
        """Port to which other nodes' keepers connect; 0: none; None: there are no other nodes as yet."""
        self.address = ""
        """Keeper that gets copies of this node's snapshots."""
        self._copying: Offer | None = None
        self._done: SnapshotKey | None = None
        """Newest snapshot that was copied, or could not be."""
        self.has_room = True
        """There is memory for copies of another node's snapshots."""

    def begin(self, cycle: Cycle) -> None:
        """Begin a cycle: where copies go is told anew. Serve keepers of other nodes from now on, if there are any."""
        self._cycle, self.address, self._done, self.has_room, prepared = cycle, "", None, True, cycle.prepared
        self._copying = None  # what is under way ends
        if self.port is None and prepared.world > len(prepared.ranks):
            self.key, self.port = bytes.fromhex(prepared.copies_key), 0
            why = "this takes FT_SECRET, the same on all nodes"
            try:
                if self.key:
                    listener = tcp.listen("", prepared.port, backlog=_BACKLOG)
                    self.port = int(listener.getsockname()[1])
                    threading.Thread(target=self.serve, args=(listener, self.key), daemon=True).start()
            except OSError as error:
                why = f"there is no port for them: {error.strerror or error}"
            if not self.port:
                self._say("door", f"no other node keeps copies of memory checkpoints: {why}")

    # -- copies of this node's snapshots ----------------------------------------------------------------------

    def is_under_way(self) -> bool:
        """Return True while a snapshot is copied, or was and may still become complete, here or on other nodes.

        Meanwhile the ranks save one more snapshot, which is copied next. As all nodes do this they copy the same ones.
        """
        settled = self._cycle.settled
        is_settled = self._done is None or (settled is not None and settled >= self._done)
        return self._copying is not None or not is_settled

    def may_be_told(self, newest: SnapshotKey) -> SnapshotKey | None:
        """Return the snapshot that the launcher may be told of, given the newest one that all ranks here have.

        Another node gets a copy first, if one keeps copies: what the job takes for complete outlives a node. Begins to
        copy the next one that all nodes copy, once it is decided whether the one copied before is complete: the other
        node has room for the complete one, and for one that comes.
        """
        if not self.address:
            return newest
        complete, prepared = self._cycle.complete, self._cycle.prepared
        is_newer = all(before is None or newest > before for before in (self._done, complete))
        if is_newer and not self.is_under_way():
            offer = self._copying = Offer(newest, prepared.ranks, prepared.world, complete)

            def check() -> None:
                if self._copying is not offer:
                    raise SnapshotError("no longer needed")

            lend = lambda want: self._ask(lambda: self.lend(want))  # noqa: E731
            job = partial(send, self.address, offer, self.key, lend, prepared.copies_bytes_per_s, check)
            work.aside(self._reactor, job, partial(self._copied, offer))
        return self._done

    def _copied(self, offer: Offer, why: str) -> None:
        if offer is not self._copying:
            return  # given up meanwhile
        self._done, self._copying = offer.key, None
        if why:  # the snapshot counts without a copy: the ranks of this node may still restore it
            of = f"iteration {offer.key.iteration}"
            self._say("copies", f"the node at {self.address} has no copy of {of}: {why}")

    # -- copies of another node's snapshots -------------------------------------------------------------------

    def admit(self, offer: Offer) -> list[HeldSegment] | str:
        """Return the segments that will hold a copy, or why it isn't taken."""
        prepared = self._cycle.prepared
        if offer.key.cycle != prepared.cycle:
            return "this node is in another cycle"
        if set(offer.ranks) & set(prepared.ranks) or not max(offer.ranks, default=0) < offer.world == prepared.world:
            return "no copies of these ranks are kept here"
        if not self.has_room:
            return "its memory doesn't suffice for copies"
        admitted = []
        for rank in offer.ranks:
            for old in self._segments.of(rank):
                if old.state is not SegmentState.LEAVING and old.key != offer.complete:
                    self._segments.drop(old)
            admitted.append(self._segments.add(rank, -1, 0, SegmentState.RECEIVING, offer.key))
        return admitted

    def lend(self, want: Fetch) -> int | str | None:
        """Return what `Lend` returns, in the keeper's loop."""
        held = self._segments.verified(want.rank).get(want.key)
        if held is not None:
            try:
                return os.dup(held.fd)
            except OSError as error:
                return str(error.strerror)  # too many open files
        if any(each.key == want.key for each in self._segments.of(want.rank, SegmentState.SEALED)):
            return None
        return f"there is no verified segment of rank {want.rank}"

    # -- in threads -------------------------------------------------------------------------------------------

    def serve(self, listener: socket.socket, key: bytes) -> None:
        """Serve the keepers of other nodes, each connection in a thread, until the process ends."""
        listener.setblocking(True)
        connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)

        def serve_one(sock: socket.socket) -> None:
            try:
                with contextlib.closing(Link(sock, key, connects=False)) as peer:
                    while True:
                        match peer.receive():
                            case Offer() as offer:
                                self._keep(peer, offer)
                            case Fetch() as want:
                                _give(peer, want, lambda want: self._ask(lambda: self.lend(want)))
                            case _:
                                raise ProtocolError("an answer came without a question")
            except link.FAILURES:
                pass  # it has all it came for; a peer that didn't says so on its own node
            finally:
                connections.release()

        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                time.sleep(_LOOK_S)  # no descriptors are left, or the peer has gone
                continue
            if connections.acquire(blocking=False):
                threading.Thread(target=serve_one, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _keep(self, peer: Link, offer: Offer) -> None:
        """Fetch the segments of a snapshot that is offered."""
        admitted = self._ask(lambda: self.admit(offer))
        if isinstance(admitted, str):
            peer.send(NotKept(admitted))
            return
        are_verified = partial(_are_verified, admitted)
        for at, held in enumerate(admitted):
            fd = -1
            try:
                fd = take(peer, Fetch(offer.key, held.rank), lambda: are_verified() is None)
            finally:
                for each in admitted[at:] if fd < 0 else [held]:  # after one that fails none comes
                    self._ask(partial(self._segments.received, each, fd))
        peer.send(Granted() if _awaited(are_verified) else NotKept("it is damaged, or no longer needed"))
