"""Port at which the keeper of this node takes copies of other nodes' snapshots. Only jobs with a secret have one."""

from __future__ import annotations

import socket
from collections.abc import Callable

from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.net.secret import memory_copies_key
from megatron_ft.launcher.base import lines

_BACKLOG = 64


class CopyDoor:
    """The listening socket, from the first need to the job's end: a keeper that replaces another one gets it, too."""

    def __init__(self, secret: bytes | None, bytes_per_s: int, say: Callable[[str], None]) -> None:
        """``secret``: the job's; ``bytes_per_s``: most that a keeper sends."""
        self.key = "" if secret is None else memory_copies_key(secret)
        self.bytes_per_s = bytes_per_s
        self._say = say
        self._listener: socket.socket | None = None
        self._has_tried = False

    @property
    def port(self) -> int:
        """The port; 0 if there is none."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def open(self) -> socket.socket | None:
        """Return the socket; None if no copies are taken, which is said once."""
        if not self._has_tried:
            self._has_tried = True
            if not self.key:
                self._say(lines.no_copies_without_secret())
                return None
            try:
                self._listener = tcp.listen("", 0, backlog=_BACKLOG)
            except OSError as error:
                self._say(lines.no_port_for_copies(error.strerror or str(error)))
        return self._listener

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
