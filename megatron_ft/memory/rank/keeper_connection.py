"""Place of a rank's snapshots, and its connection to the node's keeper."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from megatron_ft.errors import ProtocolError, SnapshotError
from megatron_ft.link.base.rank_variables import KEEPER_SOCKET_VARIABLE, RESTORE_VARIABLE
from megatron_ft.link.wire import Channel, ChannelClosedError, close_fds, connect
from megatron_ft.memory.base import digests
from megatron_ft.memory.base.digests import Digest
from megatron_ft.memory.base.keeper_messages import KEEPER_TO_RANK, Granted, KeeperHello, NotKept, RankToKeeper
from megatron_ft.memory.rules.snapshots import SnapshotKey
from megatron_ft.rank.base import say
from megatron_ft.rank.base.agreement import RankInfo

_CONNECT_S = 30.0
_QUIET_S = 300.0
"""Seconds for which a keeper that hasn't answered isn't asked again, unless a rank has to restore."""
_RETRY_S = 0.05


class RefusedError(SnapshotError):
    """Raised if the keeper refuses a request; the connection stays."""


class Place(NamedTuple):
    """Place of this rank's snapshots.

    Args:
        path: of the keeper's socket; empty: its launcher has no keeper.
        restore: what was chosen for this cycle.
        digest: None: xxhash isn't installed for this rank, or can't be loaded.
    """

    path: str
    restore: SnapshotKey | None
    info: RankInfo
    digest: Digest | None


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this rank; None if it wasn't started by a launcher that knows of memory checkpoints."""
    path = environ.get(KEEPER_SOCKET_VARIABLE)
    if path is None:
        return None
    text = environ.get(RESTORE_VARIABLE, "")
    key = SnapshotKey(*map(int, text.split(":"))) if text else None
    return Place(path, key, RankInfo.from_environment(environ, "", os.getpid()), digests.installed())


def usable_place() -> Place | None:
    """Return the place of this rank if it can keep snapshots; otherwise None, and a line says why."""
    place = find_place()
    if place is not None and (place.digest is None or not place.path):
        of = "this rank" if place.digest is None else "ft_launcher"
        say.warn_of_node(f"memory checkpoints are off: {of} can't load xxhash (pip install megatron-ft[memory])")
        return None
    return None if is_child() else place


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


class KeeperConnection:
    """Requests and answers, one at a time, in one thread at a time."""

    quiet_until_s = 0.0
    """Time until which no connection of this process asks the keeper, which hasn't answered."""
    pickle_key = ""
    """Key for the MAC of what this job pickles; known once a connection of this process was open."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._channel: Channel | None = None

    def open(self, within_s: float = _CONNECT_S, *, must: bool = True) -> bool:
        """Connect and say hello; return False if connected before. A keeper that dies is replaced: retry for a while.

        Without ``must`` a keeper that hasn't answered lately isn't asked.

        Raises:
            SnapshotError: no keeper answers, or it refuses this rank.
        """
        if self._channel is not None:
            return False
        if not self._place.path or (not must and time.monotonic() < KeeperConnection.quiet_until_s):
            raise SnapshotError("this node's launcher has no keeper that answers")
        deadline_s = time.monotonic() + within_s
        hello = KeeperHello(self._place.info.cycle, self._place.info.global_rank)
        while True:
            try:
                self._channel = connect(self._place.path, within_s)
                KeeperConnection.pickle_key = self.ask(hello, within_s)[0].pickle_key
            except (OSError, ProtocolError, SnapshotError) as error:
                self.close()
                if time.monotonic() > deadline_s or isinstance(error, FileNotFoundError | RefusedError):
                    KeeperConnection.quiet_until_s = time.monotonic() + _QUIET_S
                    # a hello that is refused says nothing about memory
                    raise SnapshotError(f"no keeper answers at {self._place.path}: {error}") from None
                time.sleep(_RETRY_S)
            else:
                return True

    def ask(self, request: RankToKeeper, timeout_s: float, *, fds: int = 0) -> tuple[Granted, int]:
        """Send a request and return its answer, and the descriptor in it, which is the caller's; -1 if ``fds`` is 0.

        Raises:
            RefusedError: the keeper refuses the request.
            SnapshotError: the keeper is gone or doesn't answer; the connection is closed.
        """
        self.tell(request)
        assert self._channel is not None
        came: tuple[int, ...] = ()
        try:
            message, came = self._channel.wait_message(timeout_s)
            found = KEEPER_TO_RANK.parse(message)
            if isinstance(found, Granted) and len(came) == fds:
                return found, came[0] if came else -1
            if isinstance(found, NotKept):
                raise RefusedError(found.why)
            raise ProtocolError(f"{len(came)} descriptors came, not {fds}")
        except (ChannelClosedError, ProtocolError, TimeoutError) as error:
            close_fds(came)
            self.close()
            raise SnapshotError(f"the keeper doesn't answer: {error}") from None

    def tell(self, message: RankToKeeper) -> None:
        """Send a message that has no answer."""
        try:
            if self._channel is None:
                raise ChannelClosedError("it was closed")
            self._channel.send(message)
        except ChannelClosedError as error:
            self.close()
            raise SnapshotError(f"the keeper is gone: {error}") from None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
