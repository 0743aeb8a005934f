"""The bare script with a section around each step, in which rank 1 stops itself, once.

``python hanging.py ours|reference STEPS SECONDS``: so many steps and so long after the first step.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import steps
import torch.distributed  # noqa: F401
from stamp import stamp, stamp_imported

SECTION = "step"


def make_client(library: str) -> Any:
    """Of the library whose launcher this runs under."""
    if library == "ours":
        from megatron_ft import RankMonitorClient
    else:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


class Section:
    """The same two calls for both libraries; the hang is in it, as soon as it is open."""

    def __init__(self, library: str, after_steps: int, after_s: float) -> None:
        self._client = make_client(library)
        self._after_steps, self._after_s = after_steps, after_s
        self._steps, self._first = 0, 0.0

    def __enter__(self) -> None:
        """Opens the section; its timeout counts from here."""
        self._steps += 1
        self._first = self._first or time.monotonic()
        is_due = self._steps > self._after_steps and time.monotonic() > self._first + self._after_s
        is_mine = is_due and os.environ["RANK"] == "1" and self._claim()
        if is_mine:
            stamp("hang", self._steps)
        self._client.start_section(SECTION)
        if is_mine:
            os.kill(os.getpid(), signal.SIGSTOP)

    def __exit__(self, *_error: Any) -> None:
        """Closes it."""
        self._client.end_section(SECTION)

    def _claim(self) -> bool:
        # the same for every launcher, whatever it calls its cycles
        try:
            os.close(os.open(os.environ["FT_BENCH_STAMPS"] + ".hung", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


if __name__ == "__main__":
    stamp_imported()
    section = Section(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    steps.run(lambda: section)
