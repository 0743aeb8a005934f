"""Port at which the keeper of this node takes copies of other nodes' snapshots. Only jobs with a secret have one."""

from __future__ import annotations

import socket
from collections.abc import Callable

from megatron_ft.ipc.net import tcp
from megatron_ft.ipc.net.secret import memory_copies_key

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
                self._say(
                    "no other node keeps copies of memory checkpoints: this takes FT_SECRET, the same on all nodes"
                )
                return None
            try:
                self._listener = tcp.listen("", 0, backlog=_BACKLOG)
            except OSError as error:
                why = error.strerror or error
                self._say(f"no other node keeps copies of memory checkpoints: there is no port for them: {why}")
        return self._listener

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
