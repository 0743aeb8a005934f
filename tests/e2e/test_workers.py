"""Signals to ranks, whatever they have come to."""

from __future__ import annotations

import os
import signal
import time

from megatron_ft.launcher.processes.worker import Worker


def test_a_process_that_leads_no_group_yet_is_signalled_itself() -> None:
    """A rank that was forked a moment ago: to end its group would end nothing, and it would run on."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    worker = Worker(0, pid, os.pidfd_open(pid), print)
    worker.signal(signal.SIGKILL, whole_group=True)
    deadline = time.monotonic() + 10
    while not worker.poll_end():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker.exitcode == -signal.SIGKILL
    worker.signal(signal.SIGTERM, whole_group=True)  # nothing of it is left, and nobody minds
    worker.reap()
