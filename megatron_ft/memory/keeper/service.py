"""The keeper's loop: ranks save and restore, the launcher says which cycle it is and what all ranks of the job have."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from megatron_ft.core.errors import LayoutError, ProtocolError
from megatron_ft.core.facts.launcher import RestoreFailed
from megatron_ft.core.wording import counted, listed
from megatron_ft.ipc.linux.node_memory import node_memory
from megatron_ft.ipc.linux.processes import is_gone
from megatron_ft.ipc.wire import Channel, ChannelClosedError, Received, accept_peer, close_fds
from megatron_ft.link.reactor import Priority, Reactor
from megatron_ft.memory.base import segment, segment_files
from megatron_ft.memory.base.digests import MakeHasher
from megatron_ft.memory.base.keeper_messages import (
    LAUNCHER_TO_KEEPER,
    RANK_TO_KEEPER,
    CommitSegment,
    DropSegment,
    Fetch,
    FilesWritten,
    KeeperHello,
    KeeperSays,
    KeeperToLauncher,
    KeeperToRank,
    KeeperWelcome,
    NotKept,
    OpenDoor,
    Prepare,
    RankBegan,
    SealedSegment,
    Segment,
    Stock,
    TakeStock,
    Verified,
    WriteFiles,
)
from megatron_ft.memory.keeper import copies, work
from megatron_ft.memory.keeper.copy_keeping import CopyKeeping
from megatron_ft.memory.keeper.segments import HeldSegment, Segments, SegmentState
from megatron_ft.memory.keeper.work import BackgroundWorker
from megatron_ft.memory.rules import retention
from megatron_ft.memory.rules.retention import BeginSegment, gigabytes
from megatron_ft.memory.rules.segment_layout import Layout
from megatron_ft.memory.rules.snapshots import EARLIER_LIFE, Complete, CopySource, CopyTo, Passed, Saved, SnapshotKey

_SEND_S = 5.0
_RANK_SEND_S = 0.5
_PAUSE_S = 0.1
"""Pause after too many open files: a connection that can't be accepted would keep the loop busy."""
_MISSED = 10
"""Number of snapshots of a rank, none of which is complete, after which the user is told."""
_LOADERS = 8
"""Files that are loaded at a time."""


@dataclass(eq=False)
class RankCaller:
    """One connection. ``rank``: -1 until its hello."""

    channel: Channel
    pidfd: int
    rank: int = -1
    waits_for: BeginSegment | Fetch | None = None
    """Request that isn't answered yet."""
    fd: int = field(init=False)

    def __post_init__(self) -> None:
        self.fd = self.channel.fileno()

    @property
    def is_open(self) -> bool:
        return self.channel.fileno() >= 0

    def answer(self, message: KeeperToRank, fds: tuple[int, ...] = ()) -> None:
        """Send a message; a caller that has gone is noticed when it is read."""
        with contextlib.suppress(ChannelClosedError):
            self.channel.send(message, fds, timeout_s=_RANK_SEND_S)


class LauncherGoneError(Exception):
    """Raised to end the keeper: its launcher has ended."""


class KeeperService:
    """Serves until the launcher's end of ``launcher`` is closed."""

    def __init__(self, listener: socket.socket, launcher: Channel, make_hasher: MakeHasher) -> None:
        self._listener = listener
        self._launcher = launcher
        self._make_hasher = make_hasher
        self._reactor = Reactor()
        self._allocator = BackgroundWorker("ft_allocate", self._reactor.post)
        self._verifier = BackgroundWorker("ft_verify", self._reactor.post)
        self._closer = BackgroundWorker("ft_close", self._reactor.post)
        self._filers: dict[int, BackgroundWorker] = {}
        self._segments = Segments()
        self._callers: dict[int, RankCaller] = {}
        """By descriptor."""
        self._prepared: Prepare | None = None
        self._complete: SnapshotKey | None = None
        self._saved: SnapshotKey | None = None
        """Newest snapshot that the launcher was told of."""
        self._released: SnapshotKey | None = None
        """Newest snapshot up to which incomplete ones needn't be kept."""
        self._demands: dict[int, BeginSegment] = {}
        """Memory for each rank that has asked for it."""
        self._is_verifying = False
        self._question: tuple[int, float] | None = None
        """The launcher's question about the stock, and the time by which it is answered."""
        self._to_write: tuple[WriteFiles, float] | None = None
        """Order that waits for segments to be verified, and the time by which its files are written."""
        self._loaded: set[int] = set()
        """Ranks whose files this cycle has begun to load, or has found unusable."""
        self._digests: dict[int, tuple[SnapshotKey, list[bytes]]] = {}
        """By rank, key and digests of its newest verified snapshot in this cycle."""
        self._incomplete: dict[int, int] = {}
        """By rank, number of snapshots that it has kept since one was complete."""
        self._said: set[str] = set()
        self._copies = CopyKeeping(
            self._segments,
            self._reactor,
            drop=self._drop,
            take=self._is_loaded,
            say=self._say,
            go_on=self._copying_went_on,
        )

    def run(self) -> None:
        """Serve."""
        # first: a rank's hello must not overtake what the launcher said before it started the rank
        self._reactor.watch(self._launcher.fileno(), self._hear_launcher, Priority.SIGNAL)
        try:
            while True:
                try:
                    self._reactor.run_once(self._patience_s())
                    # once all orders are heard: the launcher says what is complete after it hands over segments
                    self._verify_next()
                    self._tell_saved()
                    self._answer_question()
                    self._write_files()
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    self._no_descriptors()
        except LauncherGoneError:
            return

    def _no_descriptors(self) -> None:
        """Refuse what waits, and go on: descriptors may be left again a moment later."""
        self._say("descriptors", "the keeper has too many open files: some memory checkpoints are given up")
        for caller in self._callers.values():
            if caller.waits_for is not None:
                caller.waits_for = None
                caller.answer(NotKept("the keeper has too many open files"))
        time.sleep(_PAUSE_S)

    # -- the launcher -----------------------------------------------------------------------------------------

    def _tell(self, message: KeeperToLauncher, fds: tuple[int, ...] = ()) -> None:
        try:
            self._launcher.send(message, fds, timeout_s=_SEND_S)
        except ChannelClosedError:
            raise LauncherGoneError from None

    def _say(self, subject: str, text: str) -> None:
        """Have the launcher print a line, once per subject and cycle."""
        if subject not in self._said:
            self._said.add(subject)
            self._tell(KeeperSays(text))

    def _hear_launcher(self) -> None:
        try:
            for message, fds in self._launcher.receive():
                self._obey(LAUNCHER_TO_KEEPER.parse(message), fds)
        except (ChannelClosedError, ProtocolError):
            raise LauncherGoneError from None

    def _obey(self, order: Any, fds: tuple[int, ...]) -> None:
        match order:
            case Prepare():
                self._prepare(order)
            case Complete(key):
                if self._complete is None or key > self._complete:
                    self._complete = key
                    self._incomplete.clear()
                    self._tidy()
                    self._go_on()
            case Passed(key):
                self._released = key
                self._release()
            case OpenDoor() | CopyTo():
                self._copies.obey(order, fds)
            case TakeStock():
                for caller in list(self._callers.values()):
                    self._read(caller)
                within_s = math.inf if order.within_s is None else order.within_s
                self._question = order.question, time.monotonic() + within_s
            case WriteFiles():
                self._to_write = order, time.monotonic() + order.within_s
            case SealedSegment(number, rank, key):
                (fd,) = fds
                held = self._segments.add(rank, fd, os.fstat(fd).st_size, SegmentState.SEALED, number)
                held.key, held.is_with_launcher = key, True
            case DropSegment(number):
                dropped = self._segments.get(number)
                if dropped is not None and dropped.state is SegmentState.LEAVING:
                    self._close(dropped)

    def _prepare(self, order: Prepare) -> None:
        is_first, self._prepared = self._prepared is None, order
        for caller in list(self._callers.values()):
            self._forget(caller)
        lends = bool(self._copies.key)
        for held in list(self._segments.stale(order.cycle, order.restore, order.ranks, lends=lends)):
            self._drop(held)
        self._copies.begin(order)
        self._complete = self._saved = order.restore
        self._released = self._question = None
        self._demands.clear()
        self._loaded.clear()
        self._digests.clear()
        self._incomplete.clear()
        self._said.clear()
        for source in order.sources:
            for rank in set(source.ranks) & set(order.ranks):
                self._load(rank, source)
        if is_first:  # from now on it is known which ranks there are
            self._reactor.watch(self._listener.fileno(), self._accept)

    def _patience_s(self) -> float | None:
        """Return the seconds until the question must be answered; None for no bound."""
        due_s = math.inf if self._question is None else self._question[1]
        due_s = min(due_s, self._copies.due_s() or math.inf)
        return None if due_s == math.inf else max(0.0, due_s - time.monotonic())

    def _answer_question(self) -> None:
        """Answer, unless segments are still being verified and there is time left; once more when they all are."""
        if self._question is not None:
            number, due_s = self._question
            is_whole = self._segments.next_to_verify(None) is None
            if is_whole or time.monotonic() >= due_s:
                self._question = None if is_whole else (number, math.inf)
                self._tell(Stock(number, self._segments.stock()))

    # -- connections of ranks ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        for gone in [each for each in self._callers.values() if not each.is_open]:
            self._forget(gone)  # a failed send has closed it: the next connection has its descriptor's number
        accepted = accept_peer(self._listener)
        if accepted is None:
            time.sleep(_PAUSE_S)  # there may be too many open files, and the peer goes on knocking
            return
        caller = RankCaller(accepted[0], accepted[2])
        self._callers[caller.fd] = caller
        self._reactor.watch(caller.fd, partial(self._read, caller))
        self._reactor.watch(caller.pidfd, partial(self._read, caller, has_ended=True), Priority.DEATH)

    def _read(self, caller: RankCaller, *, has_ended: bool = False) -> None:
        """Read what a rank has sent, also just before it ended."""
        try:
            received: list[Received] = caller.channel.receive()
            for message, fds in received:
                close_fds(fds)
                if self._callers.get(caller.fd) is caller:
                    self._serve(caller, RANK_TO_KEEPER.parse(message))
        except ChannelClosedError:
            has_ended = True
        except ProtocolError as error:
            caller.answer(NotKept(f"the keeper can't read the request: {error}"))
            has_ended = True
        if has_ended and self._callers.get(caller.fd) is caller:
            self._forget(caller)

    def _callers_of(self, rank: int) -> list[RankCaller]:
        return [each for each in self._callers.values() if each.rank == rank]

    def _forget(self, caller: RankCaller) -> None:
        """Close a connection; what its rank was writing is worthless."""
        self._reactor.unwatch(caller.fd)
        self._reactor.unwatch(caller.pidfd)
        del self._callers[caller.fd]
        caller.channel.close()
        os.close(caller.pidfd)
        for held in self._segments.of(caller.rank, SegmentState.WRITING):
            self._drop(held)

    def _serve(self, caller: RankCaller, request: Any) -> None:
        if isinstance(request, KeeperHello):
            refused = self._refuse(caller, request)
            if not refused:
                caller.rank = request.rank
            assert self._prepared is not None
            caller.answer(NotKept(refused) if refused else KeeperWelcome(self._prepared.pickle_key))
            return
        if caller.rank < 0:
            raise ProtocolError("a request came before the hello")
        match request:
            case BeginSegment():
                self._demand(caller, request)
            case Fetch():
                caller.waits_for = request
                self._fetch(caller, request.key)
            case CommitSegment():
                self._commit(caller, request)
            case RankBegan() | RestoreFailed():
                self._tell(replace(request, rank=caller.rank))

    def _refuse(self, caller: RankCaller, hello: KeeperHello) -> str:
        assert self._prepared is not None
        if hello.cycle != self._prepared.cycle:
            return f"this is cycle {self._prepared.cycle}, not {hello.cycle}"
        if hello.rank not in self._prepared.ranks:
            return f"rank {hello.rank} is not of this node"
        others = [each for each in self._callers_of(hello.rank) if each is not caller]
        if any(each.is_open and not is_gone(each.pidfd) for each in others):
            return f"another process is connected as rank {hello.rank}"
        for gone in others:
            self._forget(gone)
        return ""

    # -- memory -----------------------------------------------------------------------------------------------

    def _demand(self, caller: RankCaller, demand: BeginSegment) -> None:
        """Reserve memory if the rank wants more than before, and see that it gets a segment."""
        assert self._prepared is not None
        known = self._demands.get(caller.rank)
        if known is None or known.total_bytes < demand.total_bytes:
            demands = {**self._demands, caller.rank: demand}
            held = self._segments.held_bytes() + sum(each.copies_bytes for each in self._demands.values())
            ranks, memory, copied = self._prepared.ranks, node_memory(), self._copies.ranks
            refused = retention.refusal(demands, ranks, held, memory, copied)
            if refused and copied:
                self._copies.has_room = False
                self._say("copies here", f"no copies of another node's memory checkpoints are kept here: {refused}")
                refused = retention.refusal(demands, ranks, held, memory)
            if refused:
                text = f"no memory checkpoints on this node, training goes on without them: {refused}"
                self._say("memory", text)
                caller.answer(NotKept(refused))
                return
            self._demands = demands
        caller.waits_for = demand
        self._begin(caller, demand)
        self._allocate_ahead(caller.rank)

    def _allocate_ahead(self, rank: int) -> None:
        """Allocate the segment that the rank will write next, if there is room for it."""
        demand = self._demands.get(rank)
        if demand is None or self._segments.of(rank, SegmentState.SPARE, SegmentState.ALLOCATING, SegmentState.WRITING):
            return
        if len(self._segments.of(rank)) < retention.SEGMENTS:
            self._allocate(rank, demand.segment_bytes)

    def _allocate(self, rank: int, nbytes: int) -> None:
        ours = segment.create()
        try:
            fd = os.dup(ours)  # of the thread: this one may close its own at any time
        except OSError:
            os.close(ours)
            raise
        held = self._segments.add(rank, ours, nbytes, SegmentState.ALLOCATING)

        def allocate() -> Callable[[], None]:
            why = work.allocate(fd, nbytes, lambda: held.state is SegmentState.ALLOCATING)
            os.close(fd)
            return partial(self._allocated, held, why)

        self._allocator.post(allocate)

    def _allocated(self, held: HeldSegment, why: str) -> None:
        if held.state is not SegmentState.ALLOCATING:
            return  # dropped meanwhile
        if not why:
            held.state = SegmentState.SPARE
            self._go_on()
            return
        self._drop(held)
        text = f"rank {held.rank} can't get {gigabytes(held.nbytes)} for a memory checkpoint, training goes on: {why}"
        self._say("pressure", text)
        for caller in self._callers_of(held.rank):
            if isinstance(caller.waits_for, BeginSegment):
                caller.waits_for = None
                caller.answer(NotKept(why))

    def _drop(self, held: HeldSegment) -> None:
        """Let go of a segment, after the launcher: whichever is last frees the memory, which takes seconds."""
        held.state = SegmentState.LEAVING
        if held.is_with_launcher:
            self._tell(DropSegment(held.number))
        else:
            self._close(held)

    def _close(self, held: HeldSegment) -> None:
        """Free a segment in the background. It counts as memory until then."""
        fd, held.fd = held.fd, -1
        if fd < 0:
            return  # is being closed

        def close() -> Callable[[], None]:
            os.close(fd)
            return partial(self._closed, held)

        self._closer.post(close)

    def _closed(self, held: HeldSegment) -> None:
        del self._segments[held.number]
        self._go_on()

    def _pinned(self) -> set[SnapshotKey]:
        """Return what the launcher was told of, and hasn't decided about."""
        assert self._prepared is not None
        common = self._segments.common(self._prepared.ranks)
        told = {key for key in common if self._saved is not None and key <= self._saved}
        return {key for key in told if self._released is None or key > self._released}

    def _release(self) -> None:
        """Drop what was given up for the job."""
        assert self._prepared is not None
        for rank in self._prepared.ranks:
            for key, held in self._segments.verified(rank).items():
                if self._released is not None and key <= self._released and key != self._complete:
                    self._drop(held)
        self._go_on()

    def _copying_went_on(self) -> None:
        self._tell_saved()
        self._tidy()
        self._go_on()

    def _tidy(self) -> None:
        assert self._prepared is not None
        for rank in self._prepared.ranks:
            verified = self._segments.verified(rank)
            if self._complete in verified:  # else this rank's own may be the newest that it can restore
                for key in [key for key in verified if key < self._complete]:
                    self._drop(verified[key])
            self._allocate_ahead(rank)
        if self._complete is not None:
            for copy in self._segments.unneeded_copies(self._prepared.ranks, self._complete):
                self._drop(copy)

    # -- writing ----------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Answer the requests that can be answered by now."""
        for caller in list(self._callers.values()):
            match caller.waits_for:
                case BeginSegment() as request:
                    self._begin(caller, request)
                case Fetch(key):
                    self._fetch(caller, key)
            self._allocate_ahead(caller.rank)

    def _begin(self, caller: RankCaller, request: BeginSegment) -> None:
        """Hand out a segment, or see that there will be one."""
        rank = caller.rank
        for held in self._segments.of(rank, SegmentState.WRITING):
            self._drop(held)  # of a snapshot that the rank has given up
        for held in self._segments.of(rank, SegmentState.SPARE):
            if held.nbytes >= request.segment_bytes:
                held.state = SegmentState.WRITING
                caller.waits_for = None
                caller.answer(Segment(), (held.fd,))
                return
            self._drop(held)
        if self._segments.of(rank, SegmentState.ALLOCATING, SegmentState.LEAVING, SegmentState.SEALED):
            return
        verified = self._segments.verified(rank)
        is_copying = self._copies.is_under_way(self._complete, self._released)
        # the newest one may be about to be that of all ranks
        pinned = set(verified) if is_copying else self._pinned() | set(sorted(verified)[-1:])
        key = retention.give_way(verified.keys(), self._complete, pinned)
        if key is not None:
            self._drop(verified[key])
        if len(self._segments.of(rank)) < retention.SEGMENTS:
            self._allocate(rank, request.segment_bytes)
        elif key is None and is_copying:
            caller.waits_for = None
            caller.answer(NotKept("copies of the snapshot before are still on their way to another node"))
        # else the launcher's word is awaited

    def _commit(self, caller: RankCaller, request: CommitSegment) -> None:
        assert self._prepared is not None
        held = next(iter(self._segments.of(caller.rank, SegmentState.WRITING)), None)
        is_of_cycle = request.key.cycle == self._prepared.cycle
        if held is None or request.nbytes > held.nbytes or not is_of_cycle:
            of = f"iteration {request.key.iteration} of cycle {request.key.cycle}"
            caller.answer(NotKept(f"there is no segment of {request.nbytes} bytes for {of}"))
            return
        try:
            segment.seal(held.fd, request.nbytes)
        except OSError as error:
            self._drop(held)
            caller.answer(NotKept(f"the segment can't be sealed: {error.strerror}"))
            return
        held.key, held.nbytes, held.state = request.key, request.nbytes, SegmentState.SEALED
        held.is_with_launcher = held.is_awaited = True
        self._tell(SealedSegment(held.number, held.rank, request.key), (held.fd,))

    def _verify_next(self) -> None:
        """Begin to verify a segment, if none is being verified."""
        if self._is_verifying or self._prepared is None:
            return
        checked = self._segments.next_to_verify(self._complete)
        if checked is None:
            return
        fd = os.dup(checked.fd)
        self._is_verifying = True

        def verify() -> Callable[[], None]:
            found = work.check(fd, self._make_hasher, lambda: checked.state is SegmentState.SEALED)
            os.close(fd)
            return partial(self._verified, checked, found)

        self._verifier.post(verify)

    def _verified(self, held: HeldSegment, found: Layout | str) -> None:
        self._is_verifying = False
        if held.state is not SegmentState.SEALED:
            return  # dropped meanwhile
        assert held.key is not None
        why = found if isinstance(found, str) else self._misplaced(held, found)
        if why:
            self._drop(held)
            of = f"of iteration {held.key.iteration} of rank {held.rank}"
            text = f"the memory checkpoint {of} is damaged and not used: {why}"
            self._say(text, text)
        elif isinstance(found, Layout):
            held.state, held.world = SegmentState.VERIFIED, found.world
            self._compare_with_last(found)
            self._count_incomplete(held.rank)
        if held.is_awaited:
            for caller in self._callers_of(held.rank):
                caller.answer(NotKept(why) if why else Verified())
        self._tell_saved()
        if self._prepared is not None:
            self._tidy()
        self._go_on()

    def _compare_with_last(self, layout: Layout) -> None:
        """Say, once per cycle, that a later snapshot of a rank has the same tensors as the one before."""
        digests = [each.digest for each in layout.tensors]
        last, before = self._digests.get(layout.rank, (None, []))
        if last is not None and layout.key <= last:
            return
        self._digests[layout.rank] = layout.key, digests
        if last is not None and digests and digests == before:
            between = f"iterations {last.iteration} and {layout.key.iteration}"
            self._say("repeats", f"no tensor of rank {layout.rank}'s memory checkpoint has changed between {between}")

    def _count_incomplete(self, rank: int) -> None:
        """Say, once per cycle, that a rank has kept many snapshots and none is one that all ranks of the job have."""
        count = self._incomplete[rank] = self._incomplete.get(rank, 0) + 1
        if count == _MISSED and self._prepared is not None:
            newest = {each: max(self._segments.verified(each), default=None) for each in self._prepared.ranks}
            texts = [
                f"rank {each} none" if key is None else f"rank {each} {key.iteration}" for each, key in newest.items()
            ]
            why = "other nodes lack it" if len(set(newest.values())) == 1 else f"the newest are {listed(texts)}"
            text = f"none of the last {_MISSED} memory checkpoints of rank {rank} is one that all ranks have: {why}"
            self._say("incomplete", text)

    def _misplaced(self, held: HeldSegment, layout: Layout) -> str:
        """Return what is wrong with a segment for its place; empty if nothing is."""
        assert held.key is not None
        is_from_file = held.key.cycle == EARLIER_LIFE
        found = SnapshotKey(EARLIER_LIFE, 0, layout.key.iteration) if is_from_file else layout.key
        if layout.rank != held.rank or held.key != found:
            return f"it holds iteration {layout.key.iteration} of rank {layout.rank}"
        prepared = self._prepared
        is_of_cycle = prepared is not None and (found.cycle == prepared.cycle or found == prepared.restore)
        if prepared is not None and is_of_cycle and layout.world != prepared.world:
            return f"it is of a job of {counted(layout.world, 'rank')}"
        return ""

    def _tell_saved(self) -> None:
        """Tell the launcher of the newest snapshot that all ranks of this node have."""
        if self._prepared is None:
            return
        newest = max(self._segments.common(self._prepared.ranks), default=None)
        if newest is not None and newest.cycle == self._prepared.cycle:
            told = self._copies.may_be_told(newest, self._complete, self._released)
            if told is not None and (self._saved is None or told > self._saved):
                self._saved = told
                self._tell(Saved(told))

    # -- restoring --------------------------------------------------------------------------------------------

    def _fetch(self, caller: RankCaller, key: SnapshotKey) -> None:
        held = self._segments.verified(caller.rank).get(key)
        if held is None and self._prepared is not None and self._prepared.files and caller.rank not in self._loaded:
            self._load(caller.rank, self._prepared.files)
        if held is None and self._segments.of(caller.rank, SegmentState.SEALED, SegmentState.ALLOCATING):
            return  # it may be one of these
        caller.waits_for = None
        if held is not None:
            caller.answer(Segment(), (held.fd,))
            return
        why = f"rank {caller.rank} has no verified segment of iteration {key.iteration} of cycle {key.cycle}"
        caller.answer(NotKept(why))

    # -- files ------------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        """Write what the launcher has asked for, once all of it is verified."""
        if self._to_write is None or self._segments.next_to_verify(None) is not None:
            return
        (order, until_s), self._to_write = self._to_write, None
        assert self._prepared is not None
        found = {rank: self._segments.verified(rank).get(order.key) for rank in self._prepared.ranks}
        lacking = [rank for rank, held in found.items() if held is None]
        if lacking:
            self._tell(FilesWritten(why=f"rank {lacking[0]} has no verified segment"))
            return
        segments = {rank: os.dup(held.fd) for rank, held in found.items() if held is not None}

        def check() -> None:
            if time.monotonic() > until_s:
                raise LayoutError("there was no more time")

        def write() -> Callable[[], None]:
            began_s = time.monotonic()
            try:
                nbytes = segment_files.write(order.directory, order.name, segments, check)
                written = FilesWritten(nbytes, time.monotonic() - began_s)
            except (OSError, LayoutError) as error:
                written = FilesWritten(why=getattr(error, "strerror", None) or str(error))
            close_fds(list(segments.values()))
            return partial(self._tell, written)

        self._post(0, write)

    def _load(self, rank: int, source: str | CopySource) -> None:
        """Load the file of a rank that an earlier life has left, or the segment that another node has."""
        prepared = self._prepared
        assert prepared is not None
        assert prepared.restore is not None
        key = prepared.restore
        self._loaded.add(rank)
        if key in self._segments.verified(rank):
            return
        held = self._segments.add(rank, -1, 0, SegmentState.ALLOCATING)
        held.key = key

        def load() -> Callable[[], None]:
            is_wanted = lambda: held.state is SegmentState.ALLOCATING  # noqa: E731
            if isinstance(source, CopySource):
                fd, why = copies.fetch(source.address, self._copies.key, key, rank, is_wanted)
            else:
                fd, why = work.load_file(source, rank, prepared.world, self._make_hasher, is_wanted)
            return partial(self._is_loaded, held, fd, why)

        self._post(rank % _LOADERS, load)

    def _post(self, number: int, job: Callable[[], Callable[[], None]]) -> None:
        filer = self._filers.get(number)
        if filer is None:
            filer = self._filers[number] = BackgroundWorker(f"ft_files_{number}", self._reactor.post)
        filer.post(job)

    def _is_loaded(self, held: HeldSegment, fd: int, why: str) -> None:
        if held.state is not SegmentState.ALLOCATING:  # dropped meanwhile
            close_fds([fd] if fd >= 0 else [])
            self._segments.pop(held.number, None)
            return
        if fd < 0:
            del self._segments[held.number]
            assert self._prepared is not None
            if held.rank in self._prepared.ranks:
                of = f"{self._prepared.files}: " if self._prepared.files else ""
                self._say(f"file {held.rank}", f"{of}rank {held.rank} can't be restored: {why}")
        else:
            assert held.key is not None
            held.fd, held.nbytes, held.state = fd, os.fstat(fd).st_size, SegmentState.SEALED
            held.is_with_launcher = True
            self._tell(SealedSegment(held.number, held.rank, held.key), (fd,))
        self._go_on()
