"""Says where the job is coordinated, at the address where launchers look for it that are started again."""

from __future__ import annotations

from megatron_ft.core.job.messages import Moved, ToMember
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.coordination.sockets import Sockets

__all__ = ["Announcer"]


class Announcer:
    """Of one launcher. If no process listens there, or another program, or one that knows it, nothing changes."""

    def __init__(self, reactor: Reactor, secret: bytes | None) -> None:
        self._sockets = Sockets(reactor, secret, self)
        self._moved: Moved | None = None

    def announce(self, address: str, moved: Moved) -> None:
        """Say it to ``host:port``; what is under way is given up."""
        self._moved = moved
        self._sockets.connect(address)

    def close(self) -> None:
        """Say nothing more."""
        self._sockets.close(within_s=0.0)

    # -- what the connection says -----------------------------------------------------------------------------

    def opened(self) -> None:
        """It is there."""
        if self._moved is not None:
            self._sockets.transmit(self._moved)

    def failed(self, problem: str) -> None:
        """No process listens there."""

    def broken(self, *, silent: bool = False) -> None:
        """The message was received, or the process there has ended."""

    def refused(self, text: str) -> None:
        """It is another job's."""

    def heard(self, message: ToMember) -> None:
        """No answer is expected."""
