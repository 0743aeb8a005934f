"""The coordinator's machine on sockets, where the process can't open more of them."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ft.coordinator import service as service_module
from megatron_ft.coordinator.service import Service
from megatron_ft.core.job.coordinator import Coordinator
from megatron_ft.ipc.net import tcp

BOUND_S = 20.0


class Full(socket.socket):
    """A listener from which no connection can be taken for a while."""

    code = errno.EMFILE
    tries = 0

    def accept(self) -> Any:
        """As it is with too many files open."""
        self.tries += 1
        if self.code:
            raise OSError(self.code, "Too many open files")
        return super().accept()


def turns_until(service: Service, condition: Callable[[], bool]) -> int:
    """How often the service has waited, and served."""
    turns, until_s = 0, time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < until_s
        service.run_once()
        turns += 1
    return turns


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_connections_that_can_not_be_taken_wait_and_cost_nothing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(service_module, "_FULL_PAUSE_S", 0.2)
    listener = Full(fileno=tcp.listen("127.0.0.1", 0).detach())
    listener.setblocking(False)
    listener.code = code
    service = Service(listener, Coordinator("c", founds=True, owned=False), secret=None, owner=None)
    said: list[str] = []
    service.say = said.append
    late = socket.create_connection(listener.getsockname(), timeout=BOUND_S)
    try:
        turns = turns_until(service, lambda: listener.tries >= 3)
        assert turns < 30
        (line,) = said
        assert line.startswith("no more launchers can be let in beside 0 connections (Too many open files)")
        listener.code = 0
        turns_until(service, lambda: bool(service._links))
        assert len(said) == 1
    finally:
        late.close()
        service._close()
