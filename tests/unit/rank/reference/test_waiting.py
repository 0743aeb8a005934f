"""Helpers that scripts take from the reference's modules."""

from __future__ import annotations

import os
import subprocess
import sys

from megatron_ft.rank.reference.waiting import is_process_alive


def test_a_process_that_has_ended_is_not_alive_before_it_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_process_alive(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # until it has ended, and leave it as it is
        assert not is_process_alive(child.pid)
    finally:
        child.communicate()
    assert not is_process_alive(child.pid)
