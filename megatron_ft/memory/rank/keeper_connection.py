"""Connection of a rank to its node's keeper."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from megatron_ft.core.errors import ProtocolError, SnapshotError
from megatron_ft.core.rank_variables import KEEPER_SOCKET_VARIABLE, RESTORE_VARIABLE
from megatron_ft.ipc.wire import Channel, ChannelClosedError, Received, close_fds, connect
from megatron_ft.memory.base import digests
from megatron_ft.memory.base.digests import MakeHasher
from megatron_ft.memory.base.keeper_messages import (
    KEEPER_TO_RANK,
    KeeperHello,
    KeeperWelcome,
    NotKept,
    RankToKeeper,
    Segment,
)
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.rank.base import say
from megatron_ft.rank.base.agreement import RankInfo

_CONNECT_S = 30.0
_HELLO_S = 30.0
_RETRY_S = 0.05
_SLICE_S = 0.2
_T = TypeVar("_T")


class RefusedError(SnapshotError):
    """Raised if the keeper refuses a request; the connection stays."""


class Place(NamedTuple):
    """Address of this rank's snapshots. ``path``: of the keeper's socket; empty: its launcher has no keeper."""

    path: str
    restore: SnapshotKey | None
    info: RankInfo


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this rank; None if it wasn't started by a launcher that knows of memory checkpoints.

    Raises:
        SnapshotError: the variables are malformed.
    """
    path = environ.get(KEEPER_SOCKET_VARIABLE)
    if path is None:
        return None
    text = environ.get(RESTORE_VARIABLE, "")
    parts = text.split(":")
    if text and (len(parts) != 3 or not all(each.removeprefix("-").isdecimal() for each in parts)):
        raise SnapshotError(f"{RESTORE_VARIABLE}={text!r} is not CYCLE:ERA:ITERATION")
    return Place(
        path, SnapshotKey(*map(int, parts)) if text else None, RankInfo.from_environment(environ, "", os.getpid())
    )


def is_child() -> bool:
    """Return True in a process that a rank has started: it has the variables of the rank, but isn't the rank."""
    return _is_fork or (
        "multiprocessing.process" in sys.modules and sys.modules["multiprocessing.process"].parent_process() is not None
    )


_is_fork = False


def _note_fork() -> None:
    global _is_fork
    _is_fork = KEEPER_SOCKET_VARIABLE in os.environ  # the fork server, from which ranks are forked, has no variable


os.register_at_fork(after_in_child=_note_fork)


def find_hasher(place: Place) -> MakeHasher | None:
    """Return the hash function; None, and a line, without it or without a keeper."""
    try:
        make_hasher = digests.installed()
    except ImportError as error:
        say.warn_of_node(f"memory checkpoints are off: xxhash can't be loaded ({error})")
        return None
    if make_hasher is None:
        say.warn_of_node("memory checkpoints are off: xxhash isn't installed (pip install megatron-ft[memory])")
        return None
    if not place.path:
        text = "memory checkpoints are off: xxhash isn't installed for ft_launcher (pip install megatron-ft[memory])"
        say.warn_of_node(text)
        return None
    return make_hasher


class KeeperConnection:
    """Requests and answers, one at a time, in one thread at a time.

    ``left``: once another thread has set it, no answer is awaited any more.
    """

    def __init__(self, place: Place, left: threading.Event | None = None) -> None:
        self._place = place
        self._left = left or threading.Event()
        self._channel: Channel | None = None
        self.pickle_key = ""
        """Known once connected."""

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    def open(self, within_s: float | None = None) -> bool:
        """Connect and say hello; return False if connected before. A keeper that dies is replaced: retry for a while.

        Raises:
            SnapshotError: no keeper answers, or it refuses this rank.
        """
        if self._channel is not None:
            return False
        if not self._place.path:
            raise SnapshotError("this node's launcher has no keeper")
        connect_s, hello_s = within_s or _CONNECT_S, within_s or _HELLO_S
        deadline_s = time.monotonic() + connect_s
        hello = KeeperHello(self._place.info.cycle, self._place.info.global_rank)
        while True:
            try:
                self._channel = connect(self._place.path, connect_s)
                self.pickle_key = self.ask(hello, KeeperWelcome, hello_s)[0].pickle_key
            except RefusedError:
                self.close()
                raise
            except (OSError, ProtocolError, SnapshotError) as error:
                self.close()
                is_over = time.monotonic() > deadline_s or self._left.is_set()
                if is_over or isinstance(error, FileNotFoundError):
                    raise SnapshotError(f"no keeper answers at {self._place.path}: {error}") from None
                time.sleep(_RETRY_S)
            else:
                return True

    def ask(self, request: RankToKeeper, answer: type[_T], timeout_s: float) -> tuple[_T, int]:
        """Send a request and return its answer, and the descriptor in it, which is the caller's; -1 without one.

        Raises:
            RefusedError: the keeper refuses the request.
            SnapshotError: the keeper is gone or doesn't answer; the connection is closed.
        """
        self.tell(request)
        assert self._channel is not None
        fds: tuple[int, ...] = ()
        try:
            message, fds = self._wait_message(self._channel, timeout_s)
            found = KEEPER_TO_RANK.parse(message)
        except (ChannelClosedError, ProtocolError, TimeoutError) as error:
            close_fds(fds)
            self.close()
            raise SnapshotError(f"the keeper doesn't answer: {error}") from None
        if isinstance(found, answer) and len(fds) == (answer is Segment):
            return found, fds[0] if fds else -1
        close_fds(fds)
        if isinstance(found, NotKept):
            raise RefusedError(found.why)
        self.close()
        name = type(found).__name__
        raise SnapshotError(f"the keeper answers {name} with {len(fds)} descriptors to {type(request).__name__}")

    def tell(self, message: RankToKeeper) -> None:
        """Send a message that has no answer.

        Raises:
            SnapshotError: the keeper is gone; the connection is closed.
        """
        if self._channel is None:
            raise SnapshotError("the keeper is gone")
        try:
            self._channel.send(message)
        except ChannelClosedError as error:
            self.close()
            raise SnapshotError(f"the keeper is gone: {error}") from None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _wait_message(self, channel: Channel, timeout_s: float) -> Received:
        deadline_s = time.monotonic() + timeout_s
        while not self._left.is_set():
            try:
                return channel.wait_message(min(_SLICE_S, timeout_s))
            except TimeoutError:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(f"no answer for {timeout_s:g} s") from None
        raise TimeoutError("its answer isn't awaited any more")
