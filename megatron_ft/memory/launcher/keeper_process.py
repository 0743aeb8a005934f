"""The keeper process of this node: started when the first rank connects, replaced if it dies, ended with the job.

The launcher has a descriptor of each sealed segment, and hands all of them to a keeper that replaces another one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from megatron_ft.errors import ProtocolError
from megatron_ft.link.base.rank_variables import KEEPER_SOCKET_VARIABLE, RESTORE_VARIABLE
from megatron_ft.link.base.wording import counted
from megatron_ft.link.facts.launcher import RestoreFailed
from megatron_ft.link.helper_process import HelperProcess
from megatron_ft.link.linux.process_setup import isolated_command
from megatron_ft.link.reactor import Reactor, Timer
from megatron_ft.link.secret import memory_copies_key, memory_pickle_key
from megatron_ft.link.wire import close_fds, listen
from megatron_ft.memory.base import keeper_messages as m
from megatron_ft.memory.launcher.snapshot_files import SnapshotFiles
from megatron_ft.memory.launcher.snapshots_on_node import FromKeeper
from megatron_ft.memory.rules.snapshots import (
    KeeperPort,
    Kept,
    OfSnapshots,
    Restore,
    Saved,
    Settled,
    SnapshotKey,
    StockTaken,
)

_QUICK_S = 10.0
_MOST_BAD = 5
"""Number of keepers in a row that may end within that time, or not answer, before the job goes on without one."""
STOCK_S = 10.0
_ANSWER_S = 3.0
"""Part of the time for the stock in which the keeper stops verifying and answers."""
_SILENT = "did not say what it has"
_SEND_S = 1.0
_STOP_WAIT_S = 2.0


class Keeper:
    """Owner of the keeper's socket, its process, and a second descriptor of each segment."""

    def __init__(
        self,
        reactor: Reactor,
        path: str,
        *,
        xxhash: str | None,
        files: SnapshotFiles,
        secret: bytes | None = None,
        copies_bytes_per_s: int = 0,
        say: Callable[[str], None],
        on_event: Callable[[FromKeeper], None],
    ) -> None:
        """``path``: of the socket, in the run directory; ``xxhash``: extension module, None: ranks are told of none.

        ``secret``: the job's. Without it, what ranks pickle can be restored only under this launcher, and no other node
        keeps copies of this one's snapshots. ``copies_bytes_per_s``: most that is sent to it.
        """
        self.path = path
        self._reactor = reactor
        self._xxhash = xxhash
        self._files = files
        copies_key = "" if secret is None else memory_copies_key(secret)
        self._blank = m.Prepare(0, (), 1, None, memory_pickle_key(secret), copies_key, copies_bytes_per_s)
        self._say = say
        self._on_event = on_event
        self.listener: socket.socket | None = None
        self._process: HelperProcess | None = None
        self._held: dict[tuple[int, SnapshotKey], int] = {}
        """Descriptor of each sealed segment, by rank and key."""
        self._prepared: m.Prepare | None = None
        self._decided: dict[type, OfSnapshots] = {}
        """Last decision of each kind in this cycle, which a keeper that replaces another one is told, too."""
        self._asked: tuple[Callable[[Kept], None], Timer] | None = None
        self._started_s = 0.0
        self._bad = 0
        self.is_given_up = xxhash is None

    # -- for the run directory --------------------------------------------------------------------------------

    def listen_again(self) -> None:
        """Recreate the socket, which was removed, with a keeper that serves it."""
        assert self.listener is not None
        lost, self.listener = self.listener, listen(self.path)
        self._reactor.unwatch(lost.fileno())
        lost.close()
        if self._process is not None:
            self._replace("has lost its socket")
        elif self._prepared is not None:
            self._reactor.watch(self.listener.fileno(), self._start)

    def listen(self) -> None:
        """Create the socket. From the first cycle on, the first rank that connects has the keeper started."""
        if not self.is_given_up:
            self.listener = listen(self.path)

    # -- what the owner asks for ------------------------------------------------------------------------------

    def prepare(self, cycle: int, ranks: Sequence[int], world: int, restore: Restore | None) -> None:
        """Begin a cycle on this node, before its ranks start: other segments than those to restore go."""
        is_first, order = self._prepared is None, replace(self._blank, cycle=cycle, ranks=tuple(ranks), world=world)
        if restore is not None:
            path = self._files.path_of(restore.files)
            order = replace(order, restore=restore.key, files=path, sources=restore.sources)
        if is_first and self.listener is not None:
            self._reactor.watch(self.listener.fileno(), self._start)
        self._prepared = order
        self._decided.clear()
        self._order(order)

    def tell(self, fact: OfSnapshots) -> None:
        """Say what the job has decided about a snapshot, or where copies go."""
        self._decided[type(fact)] = fact
        self._order(fact)
        if isinstance(fact, Settled) and fact.complete is not None:
            self._files.superseded(fact.complete)

    def complete_snapshot(self) -> tuple[SnapshotKey, int, dict[int, int]] | None:
        """Return the last snapshot that all ranks of the job have, if there is one: its key, the number of ranks of the
        job, and descriptors of this node's segments by rank, -1 for a missing one. A complete one was verified.
        """
        settled, prepared = self._decided.get(Settled), self._prepared
        key = None if prepared is None else prepared.restore
        if isinstance(settled, Settled):
            key = settled.complete
        if prepared is None or key is None:
            return None
        return key, prepared.world, {rank: self._held.get((rank, key), -1) for rank in prepared.ranks}

    def take_stock(self, then: Callable[[Kept], None]) -> None:
        """Call back with all that can be restored on this node. Nothing: without a keeper, or if it doesn't answer.

        Without a keeper ``then`` is called before this returns. A keeper that doesn't answer is replaced. What the
        keeper has verified after its answer is an event.
        """
        self._answer(Kept())  # the earlier question has no answer
        if self._process is None:
            then(Kept())
            return
        self._asked = then, self._reactor.call_later(STOCK_S, self._stock_overdue)
        self._ask()

    def variables(self) -> dict[str, str]:
        """Return the variables of each rank of the prepared cycle. An empty socket: the launcher has no xxhash."""
        restore = None if self._prepared is None else self._prepared.restore
        return {
            KEEPER_SOCKET_VARIABLE: "" if self._xxhash is None else self.path,
            RESTORE_VARIABLE: "" if restore is None else f"{restore.cycle}:{restore.era}:{restore.iteration}",
        }

    def close(self) -> None:
        """End the keeper and let go of all memory."""
        self._answer(Kept())
        if self._process is not None:
            self._process.dismiss()
            self._process.wait(time.monotonic() + _STOP_WAIT_S)
        self._let_go_of_socket()
        close_fds([*self._held.values()])
        self._held.clear()

    # -- the life of the process ------------------------------------------------------------------------------

    def _start(self) -> None:
        if self.listener is None:
            return
        self._reactor.unwatch(self.listener.fileno())
        self._started_s = time.monotonic()
        try:
            self._process = HelperProcess(
                *(self._reactor, self._spawn),
                parse=m.KEEPER_TO_LAUNCHER.parse,
                take=self._take,
                ended=self._replace,
            )
        except OSError as error:
            self._replace(f"can't be started ({error.strerror})")
            return
        for name, fd in list(self._held.items()):
            self._order(m.SealedSegment(*name), (fd,))
        assert self._prepared is not None
        for order in (replace(self._prepared, port=self._blank.port), *self._decided.values()):
            self._order(order)

    def _spawn(self, launcher_fd: int) -> subprocess.Popen[bytes]:
        assert self.listener is not None
        assert self._xxhash is not None
        fds = {"--socket-fd": self.listener.fileno(), "--launcher-fd": launcher_fd}
        words = {**fds, "--parent": os.getpid(), "--xxhash": self._xxhash}
        return subprocess.Popen(  # with the launcher's limit of open files: it holds as many segments
            [*isolated_command("megatron_ft.memory.keeper"), *(str(word) for pair in words.items() for word in pair)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=list(fds.values()),
            env={key: value for key, value in os.environ.items() if not key.startswith("FT_SECRET")},
            start_new_session=True,
        )

    def _replace(self, how: str) -> None:
        """Start another process in place of this one, unless several in a row were of no use."""
        before, self._process = self._process, None
        if before is not None:
            before.dismiss()
        is_bad = how == _SILENT or time.monotonic() - self._started_s < _QUICK_S
        self._bad = self._bad + 1 if is_bad else 1
        if self._bad < _MOST_BAD:
            segments = counted(len(self._held), "segment")
            self._say(f"the keeper of memory checkpoints {how}; another one takes over {segments}")
            self._start()
            self._ask()
            return
        self.is_given_up = True
        self._say(
            f"the keeper of memory checkpoints {how} again and again; the job trains on without memory checkpoints"
        )
        self._let_go_of_socket()
        self._free([*self._held.values()])
        self._held.clear()
        self._answer(Kept())
        self._on_event(StockTaken(Kept(), is_last=True))

    def _let_go_of_socket(self) -> None:
        if self.listener is not None:
            self._reactor.unwatch(self.listener.fileno())
            self.listener.close()
            self.listener = None
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    # -- messages ---------------------------------------------------------------------------------------------

    def _order(self, order: m.LauncherToKeeper, fds: tuple[int, ...] = ()) -> None:
        if self._process is not None:
            self._process.send(order, fds, timeout_s=_SEND_S)

    def _take(self, message: Any, fds: tuple[int, ...]) -> None:
        match message:
            case m.SealedSegment(rank, key):
                if len(fds) != 1 or (rank, key) in self._held:
                    close_fds(fds)
                    raise ProtocolError("a segment comes with one descriptor, once")
                self._held[rank, key] = fds[0]
                return
            case m.DropSegment(rank, key):
                if (rank, key) in self._held:
                    self._free([self._held.pop((rank, key))])
                self._order(message)
            case Kept():
                if self._asked is None:  # of a keeper that has replaced another one, or a second answer
                    self._on_event(StockTaken(message))
                self._answer(message)
            case m.Says(text):
                self._say(text)
            case KeeperPort(_, port):
                self._blank = replace(self._blank, port=port)  # a keeper that replaces this one listens there, too
                self._on_event(message)
            case m.RankBegan() | RestoreFailed() | Saved():
                self._on_event(message)
        close_fds(fds)

    # -- answers ----------------------------------------------------------------------------------------------

    def _answer(self, kept: Kept) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].cancel()
            asked[0](kept)

    def _ask(self) -> None:
        """Ask for the stock, in time for the timer; if no caller waits for it, once everything is verified."""
        left_s = None if self._asked is None else self._asked[1].at_s - time.monotonic() - _ANSWER_S
        self._order(m.TakeStock(None if left_s is None else max(0.0, left_s)))

    def _stock_overdue(self) -> None:
        self._answer(Kept())
        self._replace(_SILENT)

    def _free(self, fds: Sequence[int]) -> None:
        """Free the memory of segments: 10 GB take a second, in which the launcher has other things to do."""
        try:
            self._reactor.call_in_thread(lambda: close_fds(fds), lambda _: None)
        except RuntimeError:  # no thread is to be had
            close_fds(fds)
