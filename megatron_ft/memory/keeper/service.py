"""The keeper's loop: ranks save and restore, the launcher says which cycle it is and what all ranks of the job have."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.wording import listed
from megatron_ft.link.facts.launcher import RestoreFailed
from megatron_ft.link.linux.processes import is_gone
from megatron_ft.link.reactor import Priority, Reactor
from megatron_ft.link.wire import Channel, ChannelClosedError, Received, accept_peer, close_fds
from megatron_ft.memory.base import keeper_messages as m
from megatron_ft.memory.base import segment, segment_files
from megatron_ft.memory.base.digests import Digest
from megatron_ft.memory.base.node_memory import node_memory
from megatron_ft.memory.keeper import copies, work
from megatron_ft.memory.keeper.copies import CopyKeeping
from megatron_ft.memory.keeper.link import FAILURES, connect
from megatron_ft.memory.keeper.segments import Cycle, HeldSegment, Segments, SegmentState
from megatron_ft.memory.rules import retention
from megatron_ft.memory.rules.retention import BeginSegment
from megatron_ft.memory.rules.segment_layout import Layout
from megatron_ft.memory.rules.snapshots import CopySource, CopyTo, KeeperPort, Saved, Settled, SnapshotKey

_SEND_S = 5.0
_RANK_SEND_S = 0.5
_PAUSE_S = 0.1
"""Pause after too many open files: a connection that can't be accepted would keep the loop busy."""
_MISSED = 10
"""Number of snapshots of a rank, none of which is complete, after which the user is told."""
_NO_DESCRIPTORS = "the keeper has too many open files"


@dataclass(eq=False)
class RankCaller:
    """One connection, of which a rank may have several. ``rank``: -1 until its hello; ``fd``: also once it is closed.

    ``writes``: it has asked for a segment; what it writes ends with it.
    """

    channel: Channel
    pid: int
    pidfd: int
    fd: int
    rank: int = -1
    writes: bool = False
    waits_for: BeginSegment | m.CommitSegment | m.Fetch | None = None
    """Request that isn't answered yet."""


class KeeperService:
    """Serves until the launcher's end of ``launcher`` is closed.

    A message, or what a thread has done, changes what is known here. After each turn of the loop `_advance` does all
    that follows: it drops segments, answers requests, begins to verify, and tells the launcher.
    """

    def __init__(self, listener: socket.socket, launcher: Channel, digest: Digest) -> None:
        self._listener = listener
        self._launcher = launcher
        self._digest = digest
        self._reactor = Reactor()
        self._segments = Segments(self._reactor, self._tell)
        self._callers: list[RankCaller] = []
        self._cycle = Cycle(m.Prepare(0, (), 1))
        self._is_verifying = False
        self._copies = CopyKeeping(self._segments, self._reactor, self._say)

    def run(self) -> None:
        """Serve."""
        # first: a rank's hello must not overtake what the launcher said before it started the rank
        self._reactor.watch(self._launcher.fileno(), self._hear_launcher, Priority.SIGNAL)
        with contextlib.suppress(EOFError):  # the launcher has ended
            while True:
                try:
                    due_s = self._cycle.stock_due_s
                    self._reactor.run_once(None if due_s in (None, math.inf) else max(0.0, due_s - time.monotonic()))
                    if self._cycle.prepared.ranks:
                        self._advance(self._cycle, self._cycle.prepared)
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    # refuse what waits, and go on: descriptors may be left again a moment later
                    self._say("descriptors", f"{_NO_DESCRIPTORS}: some memory checkpoints are given up")
                    for caller in list(self._callers):
                        if caller.waits_for is not None:
                            self._answer(caller, m.NotKept(_NO_DESCRIPTORS))
                    time.sleep(_PAUSE_S)
                    self._reactor.post(lambda: None)  # what has failed is tried again

    def _advance(self, cycle: Cycle, prepared: m.Prepare) -> None:
        """Do all that can be done by now."""
        for held in self._segments.unneeded(prepared.ranks, cycle.complete, cycle.settled):
            self._segments.drop(held)
        for caller in list(self._callers):
            match caller.waits_for:
                case BeginSegment() as request:
                    self._begin(caller, request)
                case m.Fetch(key):
                    self._fetch(caller, key)
        sealed = self._segments.next_to_verify(cycle.complete)
        if sealed is not None and not self._is_verifying:
            self._verify(sealed)
        verified = [set(self._segments.verified(rank)) for rank in prepared.ranks]
        newest = max(set.intersection(*verified), default=None)
        if newest is not None and newest.cycle == prepared.cycle:
            told = self._copies.may_be_told(newest)
            if told is not None and (cycle.saved is None or told > cycle.saved):
                cycle.saved = told
                self._tell(Saved(told))
        if cycle.stock_due_s is not None and (sealed is None or time.monotonic() >= cycle.stock_due_s):
            cycle.stock_due_s = None if sealed is None else math.inf  # what is verified after its time is told, too
            self._tell(replace(self._segments.stock(), port=self._copies.port or 0))

    # -- the launcher -----------------------------------------------------------------------------------------

    def _tell(self, message: m.KeeperToLauncher, fds: tuple[int, ...] = ()) -> None:
        try:
            self._launcher.send(message, fds, timeout_s=_SEND_S)
        except ChannelClosedError:
            raise EOFError("the launcher has ended") from None

    def _say(self, subject: str, text: str) -> None:
        """Have the launcher print a line, once per subject and cycle."""
        if subject not in self._cycle.said:
            self._cycle.said.add(subject)
            self._tell(m.Says(text))

    def _hear_launcher(self) -> None:
        try:
            for message, fds in self._launcher.receive():
                self._obey(m.LAUNCHER_TO_KEEPER.parse(message), fds)
        except (ChannelClosedError, ProtocolError):
            raise EOFError("the launcher has ended") from None

    def _obey(self, order: Any, fds: tuple[int, ...]) -> None:
        match order:
            case m.Prepare():
                self._prepare(order)
            case Settled(key, complete):
                if complete not in (None, self._cycle.complete):
                    self._cycle.incomplete.clear()
                self._cycle.settled, self._cycle.complete = key, complete or self._cycle.complete
            case CopyTo(cycle, address) if cycle == self._cycle.prepared.cycle:
                self._copies.address = address
            case m.TakeStock(within_s):
                for caller in list(self._callers):
                    self._read(caller)
                self._cycle.stock_due_s = time.monotonic() + (math.inf if within_s is None else within_s)
            case m.SealedSegment(rank, key):
                (fd,) = fds
                self._segments.add(rank, fd, os.fstat(fd).st_size, SegmentState.SEALED, key)
            case m.DropSegment(rank, key):
                for held in [each for each in self._segments.of(rank, SegmentState.LEAVING) if each.key == key]:
                    self._segments.close(held)

    def _prepare(self, order: m.Prepare) -> None:
        if not self._cycle.prepared.ranks:  # from now on it is known which ranks there are
            self._reactor.watch(self._listener.fileno(), self._accept)
        for caller in list(self._callers):
            self._forget(caller)
        self._cycle = Cycle(order, complete=order.restore, saved=order.restore, settled=order.restore)
        self._copies.begin(self._cycle)
        if self._copies.port:
            self._tell(KeeperPort(order.cycle, self._copies.port))
        for held in list(self._segments.stale(order.cycle, order.restore, order.ranks, lends=bool(self._copies.port))):
            self._segments.drop(held)

    # -- connections of ranks ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        accepted = accept_peer(self._listener)
        if accepted is None:
            time.sleep(_PAUSE_S)  # there may be too many open files, and the peer goes on knocking
            return
        caller = RankCaller(*accepted, accepted[0].fileno())
        self._callers.append(caller)
        self._reactor.watch(caller.fd, partial(self._read, caller))
        self._reactor.watch(caller.pidfd, partial(self._read, caller, has_ended=True), Priority.DEATH)

    def _read(self, caller: RankCaller, *, has_ended: bool = False) -> None:
        """Read what a rank has sent, also just before it ended."""
        try:
            received: list[Received] = caller.channel.receive()
            for message, fds in received:
                close_fds(fds)
                if caller in self._callers:
                    self._serve(caller, m.RANK_TO_KEEPER.parse(message))
        except ChannelClosedError:
            has_ended = True
        except ProtocolError as error:
            self._answer(caller, m.NotKept(f"the keeper can't read the request: {error}"))
            has_ended = True
        if has_ended:
            self._forget(caller)

    def _answer(self, caller: RankCaller, message: m.KeeperToRank, fds: tuple[int, ...] = ()) -> None:
        caller.waits_for = None
        try:
            caller.channel.send(message, fds, timeout_s=_RANK_SEND_S)
        except ChannelClosedError:
            self._forget(caller)

    def _forget(self, caller: RankCaller) -> None:
        """Close a connection, once; what its rank was writing is worthless."""
        if caller not in self._callers:
            return
        self._callers.remove(caller)
        self._reactor.unwatch(caller.fd)
        self._reactor.unwatch(caller.pidfd)
        caller.channel.close()
        os.close(caller.pidfd)
        for held in self._segments.of(caller.rank, SegmentState.WRITING) if caller.writes else []:
            self._segments.drop(held)

    def _serve(self, caller: RankCaller, request: Any) -> None:
        if isinstance(request, m.KeeperHello):
            refused = self._refuse(caller, request)
            if not refused:
                caller.rank = request.rank
            self._answer(caller, m.NotKept(refused) if refused else m.Granted(self._cycle.prepared.pickle_key))
            return
        if caller.rank < 0:
            raise ProtocolError("a request came before the hello")
        match request:
            case BeginSegment():
                self._demand(caller, request)
            case m.Fetch():
                caller.waits_for = request
            case m.CommitSegment():
                self._commit(caller, request)
            case m.RankBegan() | RestoreFailed():
                self._tell(replace(request, rank=caller.rank))
                if isinstance(request, RestoreFailed):
                    self._answer(caller, m.Granted())

    def _refuse(self, caller: RankCaller, hello: m.KeeperHello) -> str:
        if hello.cycle != self._cycle.prepared.cycle:
            return f"this is cycle {self._cycle.prepared.cycle}, not {hello.cycle}"
        if hello.rank not in self._cycle.prepared.ranks:
            return f"rank {hello.rank} is not of this node"
        others = [each for each in self._callers if each.rank == hello.rank and each.pid != caller.pid]
        if not all(is_gone(each.pidfd) for each in others):
            return f"another process is connected as rank {hello.rank}"
        for gone in others:
            self._forget(gone)
        return ""

    # -- memory -----------------------------------------------------------------------------------------------

    def _demand(self, caller: RankCaller, demand: BeginSegment) -> None:
        """Reserve memory if the rank wants more than before."""
        known = self._cycle.demands.get(caller.rank)
        if known is None or known.total_bytes < demand.total_bytes:
            demands = {**self._cycle.demands, caller.rank: demand}
            # what is dropped counts until it is closed
            held = sum(each.nbytes for each in self._segments)
            held += sum(each.copies_bytes for each in self._cycle.demands.values())
            ranks, memory = self._cycle.prepared.ranks, node_memory()
            copied = len(ranks) if self._copies.port else 0  # the other node has as many
            refused = retention.refusal(demands, ranks, held, memory, copied)
            if refused and copied:
                self._copies.has_room = False
                self._say("copies here", f"no copies of another node's memory checkpoints are kept here: {refused}")
                refused = retention.refusal(demands, ranks, held, memory)
            if refused:
                self._say("memory", f"no memory checkpoints on this node, training goes on without them: {refused}")
                self._answer(caller, m.NotKept(refused))
                return
            self._cycle.demands = demands
        for held_segment in self._segments.of(caller.rank, SegmentState.WRITING):
            self._segments.drop(held_segment)  # of a snapshot that the rank has given up
        caller.waits_for, caller.writes = demand, True

    # -- writing ----------------------------------------------------------------------------------------------

    def _begin(self, caller: RankCaller, request: BeginSegment) -> None:
        """Hand out an empty segment once there is a place for it: until then the launcher's word is awaited."""
        rank = caller.rank
        if self._segments.of(rank, SegmentState.RECEIVING, SegmentState.LEAVING, SegmentState.SEALED):
            return
        verified = self._segments.verified(rank)
        if len(verified) < retention.SEGMENTS:
            fd = segment.create()
            self._segments.add(rank, fd, request.segment_bytes, SegmentState.WRITING)
            self._answer(caller, m.Granted(), (fd,))
            return
        if self._copies.is_under_way():
            self._answer(caller, m.NotKept("copies of the snapshot before are still on their way to another node"))
            return
        saved, settled = self._cycle.saved, self._cycle.settled
        # the newest one may be about to be that of all ranks; what the launcher was told of isn't decided yet
        pinned = {self._cycle.complete, max(verified)} | {
            key for key in verified if saved is not None and key <= saved and (settled is None or key > settled)
        }
        if unpinned := set(verified) - pinned:
            self._segments.drop(verified[min(unpinned)])

    def _commit(self, caller: RankCaller, request: m.CommitSegment) -> None:
        held = next(iter(self._segments.of(caller.rank, SegmentState.WRITING)), None)
        is_of_cycle = request.key.cycle == self._cycle.prepared.cycle
        if held is None or request.nbytes > held.nbytes or not is_of_cycle:
            of = f"iteration {request.key.iteration} of cycle {request.key.cycle}"
            self._answer(caller, m.NotKept(f"there is no segment of {request.nbytes} bytes for {of}"))
            return
        try:
            segment.seal(held.fd, request.nbytes)
        except OSError as error:
            self._segments.drop(held)
            self._answer(caller, m.NotKept(f"the segment can't be sealed: {error.strerror}"))
            return
        for old in self._segments.of(caller.rank, SegmentState.SEALED, SegmentState.VERIFIED):
            if old.key == request.key:  # of another process that this rank has run in the same cycle
                self._segments.drop(old)
        held.key, held.nbytes, caller.waits_for = request.key, request.nbytes, request
        self._segments.sealed(held)

    def _verify(self, checked: HeldSegment) -> None:
        fd = os.dup(checked.fd)
        self._is_verifying = True

        def verify() -> Layout | str:
            with os.fdopen(fd, "rb"):
                return work.check(fd, self._digest, lambda: checked.state is SegmentState.SEALED)

        work.aside(self._reactor, verify, partial(self._verified, checked))

    def _verified(self, held: HeldSegment, found: Layout | str) -> None:
        self._is_verifying = False
        if held.state is not SegmentState.SEALED:
            return  # dropped meanwhile
        assert held.key is not None
        why = found if isinstance(found, str) else found.why_not(held.key, held.rank, self._cycle.prepared.world)
        if why:
            self._segments.drop(held)
            of = f"of iteration {held.key.iteration} of rank {held.rank}"
            text = f"the memory checkpoint {of} is damaged and not used: {why}"
            self._say(text, text)
        elif isinstance(found, Layout):
            held.state, held.world = SegmentState.VERIFIED, found.world
            self._cycle.incomplete[held.rank] += 1
            if self._cycle.incomplete[held.rank] == _MISSED:  # said once per cycle
                ranks = self._cycle.prepared.ranks
                newest = [(each, max(self._segments.verified(each), default=None)) for each in ranks]
                texts = [f"rank {each} {'none' if key is None else key.iteration}" for each, key in newest]
                what = f"none of the last {_MISSED} memory checkpoints of rank {held.rank} is one that all ranks have"
                self._say("incomplete", f"{what}: the newest of this node are {listed(texts)}")
        for caller in list(self._callers):
            if caller.rank == held.rank and isinstance(caller.waits_for, m.CommitSegment):
                self._answer(caller, m.NotKept(why) if why else m.Granted())

    # -- restoring --------------------------------------------------------------------------------------------

    def _fetch(self, caller: RankCaller, key: SnapshotKey) -> None:
        rank, prepared, loaded = caller.rank, self._cycle.prepared, self._cycle.loaded
        held = self._segments.verified(rank).get(key)
        if held is not None:
            self._answer(caller, m.Granted(), (held.fd,))
            return
        if self._segments.of(rank, SegmentState.SEALED, SegmentState.RECEIVING):
            return  # it may be one of these
        source = prepared.files or next((each for each in prepared.sources if rank in each.ranks), None)
        if source and key == prepared.restore and rank not in loaded:
            loaded.add(rank)
            self._load(rank, key, source)
            return
        why = f"rank {rank} has no verified segment of iteration {key.iteration} of cycle {key.cycle}"
        self._answer(caller, m.NotKept(why))

    def _load(self, rank: int, key: SnapshotKey, source: str | CopySource) -> None:
        """Load the file of a rank that an earlier life has left, or the segment that another node has."""
        held, prepared = self._segments.add(rank, -1, 0, SegmentState.RECEIVING, key), self._cycle.prepared

        def load() -> tuple[int, str]:
            is_wanted = lambda: held.state is SegmentState.RECEIVING  # noqa: E731
            try:
                if isinstance(source, CopySource):
                    with contextlib.closing(connect(source.address, self._copies.key)) as peer:
                        return copies.take(peer, m.Fetch(key, rank), is_wanted), ""
                return segment_files.load(*os.path.split(source), rank, work.room_maker(is_wanted)), ""
            except FAILURES as error:
                return -1, work.why(error)

        def loaded(found: tuple[int, str]) -> None:
            if self._segments.received(held, found[0]) and found[1]:
                of = f"{prepared.files}: " if prepared.files else ""
                self._say(f"file {rank}", f"{of}rank {rank} can't be restored: {found[1]}")

        work.aside(self._reactor, load, loaded)
