"""A request to stop is reported once, and breaks off what waits."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from megatron_ft.core.records.launcher import StopRequested
from megatron_ft.ipc.files.event_log import EventLog
from megatron_ft.launcher.base.event_loop import Reactor
from megatron_ft.launcher.base.signals import SignalWatch
from megatron_ft.launcher.base.stop_requests import StopRequests


def test_a_request_is_reported_once_and_breaks_off_each_wait() -> None:
    said: list[str] = []
    written: list[Any] = []
    reactor, watch = Reactor(), SignalWatch(())
    log = cast("EventLog", SimpleNamespace(write=written.append))
    stop = StopRequests(watch, reactor, log=log, say=said.append, timeout_s=7.0)
    stop.check()
    assert stop.blocking(lambda: 3) == 3
    assert (said, written) == ([], [])
    watch.note(signal.SIGTERM, 0.0)
    others_come = threading.Event()
    for _ in range(2):
        with pytest.raises(SignalException) as raised:
            stop.blocking(others_come.wait)
        assert raised.value.sigval == signal.SIGTERM
    others_come.set()
    stop.report(ranks=8)
    assert len(said) == 1
    assert written == [StopRequested(signal="SIGTERM", ranks=0)]
    watch.close()
    reactor.close()
